"""Engines that turn prompts into completions with the log-probs of the policy that sampled them."""
