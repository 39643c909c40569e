"""Loading models and exporting them to plain Hugging Face folders."""
