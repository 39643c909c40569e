from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from covary.rewards import FunctionFile, Grade, Graded, Grader, Pool
from covary.types import RunError

FILE = """
import os, signal, subprocess, sys, time

def act(completion):
    word, _, rest = completion.partition(" ")
    if word == "hang":
        time.sleep(1000)
    if word == "spin":  # holds the interpreter's lock
        import re
        re.match(r"(a+)+b", "a" * 60)
    if word == "exit":
        os._exit(3)
    if word == "quit":
        sys.exit("bye")
    if word == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "eat":
        return len(bytearray(8 << 30))
    if word == "print":
        print("{" * 100, flush=True)
        os.write(1, b"from below\\\\n")
        subprocess.run(["echo", "from a child"])
        sys.stdin.read()
    if word == "close":
        os.closerange(3, 50)
    if word == "pid":
        return os.getpid()
    if word == "child":
        child = subprocess.Popen(["sleep", "1000"])
        open(rest, "w").write(str(child.pid))
        time.sleep(1000)
    if word == "nap":
        open(rest, "w").write(str(os.getpid()))
        time.sleep(1)
        return 1.0
    if word == "children":  # one forked, one a program: how a signal ends them
        import multiprocessing
        forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
        forked.start()
        program = subprocess.Popen(["sleep", "1000"])
        time.sleep(0.2)
        for child in (forked, program):
            os.kill(child.pid, int(rest))
        forked.join()
        return forked.exitcode + program.wait()
    if word == "note":
        open(rest, "w").write(str(os.getpid()))
        time.sleep(1000)
    return float(len(completion))
"""


def items(*completions: str) -> list[tuple[str, str | None, dict[str, Any]]]:
    return [(completion, None, {}) for completion in completions]


@pytest.fixture
def task(tmp_path: Path) -> FunctionFile:
    path = tmp_path / "reward.py"
    path.write_text(FILE)
    return FunctionFile(str(path), "act")


@pytest.fixture
def make_pool() -> Iterator[Callable[..., Pool]]:
    pools: list[Pool] = []

    def make(**options: Any) -> Pool:
        pools.append(Pool(**options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_order_is_kept(make_pool: Callable[..., Pool]) -> None:
    pairs = [(str(i % 7), str(i % 5), {}) for i in range(500)]
    graded = make_pool(workers=2).run(Grader("exact"), pairs)
    assert [item.value for item in graded] == [float(i % 7 == i % 5) for i in range(500)]


def test_nothing_to_grade_starts_nothing(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool()
    assert pool.run(Grader("exact"), []) == []
    assert pool._running == []


@pytest.mark.parametrize("word", ["hang", "spin"])
def test_late_item_is_unscorable_and_harms_no_other(
    word: str, task: FunctionFile, make_pool: Callable[..., Pool]
) -> None:
    pool = make_pool(workers=2, deadline=1)
    started = time.monotonic()
    verdicts = pool.run(task, items("a", word, "abc", "ab", word))
    assert time.monotonic() - started < 20
    late = Graded(None, "no verdict within 1 s")
    assert verdicts == [Graded(1.0), late, Graded(3.0), Graded(2.0), late]


def test_dead_process_is_unscorable_and_replaced(task: FunctionFile, make_pool: Callable[..., Pool]) -> None:
    verdicts = make_pool(workers=1).run(task, items("exit", "a", "kill", "ab", "close", "abc"))
    assert verdicts == [
        Graded(None, "the grader's process died (exit code 3)"),
        Graded(1.0),
        Graded(None, "the grader's process died (signal 9)"),
        Graded(2.0),
        verdicts[4],
        Graded(3.0),
    ]
    assert verdicts[4].value is None
    assert verdicts[4].error is not None
    assert "died" in verdicts[4].error


def test_sys_exit_is_an_error_of_the_item(task: FunctionFile, make_pool: Callable[..., Pool]) -> None:
    verdicts = make_pool(workers=1).run(task, items("quit", "pid", "pid"))
    assert verdicts[0] == Graded(None, "SystemExit: bye")
    assert verdicts[1] == verdicts[2]


def test_killed_from_outside(task: FunctionFile, make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(workers=1)
    (first,) = pool.run(task, items("pid"))
    assert first.value is not None
    os.kill(int(first.value), signal.SIGKILL)  # while it has nothing to do: no item is lost
    assert wait_for(lambda: not is_alive(int(first.value or 0)), 5)
    (second,) = pool.run(task, items("pid"))
    assert second.value not in (None, first.value)


def test_killed_from_outside_at_work(task: FunctionFile, make_pool: Callable[..., Pool], tmp_path: Path) -> None:
    note = tmp_path / "pid"

    def kill() -> None:
        assert wait_for(lambda: note.exists() and note.read_text() != "", 30)
        os.kill(int(note.read_text()), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    verdicts = make_pool(workers=1, deadline=30).run(task, items("a", f"note {note}", "ab"))
    killer.join()
    died = Graded(None, "the grader's process died (signal 9)")
    assert verdicts == [Graded(1.0), died, Graded(2.0)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_every_process_of_the_job_costs_no_verdict(
    number: int, task: FunctionFile, make_pool: Callable[..., Pool], tmp_path: Path
) -> None:
    """A cluster's SIGTERM reaches the workers too, while the run finishes its step. A reward's own children still obey."""
    note = tmp_path / "pid"
    pool = make_pool(workers=1, deadline=30)

    def signal_worker() -> None:
        assert wait_for(lambda: note.exists() and note.read_text() != "", 30)
        os.kill(int(note.read_text()), number)

    signaller = threading.Thread(target=signal_worker)
    signaller.start()
    assert pool.run(task, items(f"nap {note}", f"children {number}")) == [Graded(1.0), Graded(-2.0 * number)]
    signaller.join()


def test_stopped_process_and_an_item_larger_than_a_pipe(task: FunctionFile, make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(workers=1, deadline=1)
    big = "x" * 1_000_000
    (pid,) = pool.run(task, items("pid"))
    assert pool.run(task, items(big)) == [Graded(1_000_000.0)]
    os.kill(int(pid.value or 0), signal.SIGSTOP)
    assert pool.run(task, items(big, "a")) == [Graded(None, "no verdict within 1 s"), Graded(1.0)]


def test_children_die_with_their_process(task: FunctionFile, make_pool: Callable[..., Pool], tmp_path: Path) -> None:
    note = tmp_path / "child"
    (verdict,) = make_pool(workers=1, deadline=1).run(task, items(f"child {note}"))
    assert verdict == Graded(None, "no verdict within 1 s")
    assert wait_for(lambda: not is_alive(int(note.read_text())), 5)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux only")
def test_memory_bomb_is_an_error_of_its_item(task: FunctionFile, make_pool: Callable[..., Pool]) -> None:
    verdicts = make_pool(workers=1).run(task, items("eat", "a"))
    assert verdicts == [Graded(None, "MemoryError"), Graded(1.0)]


def test_printing_goes_to_stderr(
    task: FunctionFile, make_pool: Callable[..., Pool], capfd: pytest.CaptureFixture[str]
) -> None:
    assert make_pool(workers=1).run(task, items("print", "a")) == [Graded(5.0), Graded(1.0)]
    out, err = capfd.readouterr()
    assert out == ""
    assert "{" * 100 in err
    assert "from below" in err
    assert "from a child" in err


def test_any_thread_may_use_it(task: FunctionFile, make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(workers=2, deadline=1)
    verdicts: dict[str, list[Graded]] = {}

    def use(text: str) -> None:
        verdicts[text] = pool.run(task, items(text, "hang", text))

    threads = [threading.Thread(target=use, args=("a" * n,)) for n in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    late = Graded(None, "no verdict within 1 s")
    assert verdicts == {
        "a": [Graded(1.0), late, Graded(1.0)],
        "aa": [Graded(2.0), late, Graded(2.0)],
    }


def test_one_pool_serves_several_tasks(task: FunctionFile, make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(workers=1)
    right = Graded(1.0, grade=Grade("correct", "4"))
    assert pool.run(Grader("exact"), [("4", "4", {})]) == [right]
    assert pool.run(task, items("abc")) == [Graded(3.0)]
    assert pool.run(Grader("exact", "last_number"), [("= 4.", "4", {})]) == [right]


def test_columns_that_cannot_be_pickled(make_pool: Callable[..., Pool]) -> None:
    columns = {"lock": threading.Lock()}
    verdicts = make_pool(workers=1).run(Grader("exact"), [("4", "4", columns), ("4", "4", {})])
    assert verdicts[1] == Graded(1.0, grade=Grade("correct", "4"))
    assert verdicts[0].value is None
    assert "cannot pickle" in str(verdicts[0].error)


@pytest.mark.parametrize("source", ["raise RuntimeError('not here')", "import os; os._exit(5)"])
def test_task_that_cannot_be_loaded_ends_the_run_not_the_program(
    source: str, tmp_path: Path, make_pool: Callable[..., Pool]
) -> None:
    path = tmp_path / "broken.py"
    path.write_text(source)
    verdicts = make_pool(workers=2).run(FunctionFile(str(path), "act"), items("a", "b", "c"))
    assert len(verdicts) == 3
    assert {v.value for v in verdicts} == {None}
    assert all("the grader could not be loaded: " in str(v.error) for v in verdicts)


def test_close_ends_the_processes_and_a_later_run_starts_new_ones(
    task: FunctionFile, make_pool: Callable[..., Pool]
) -> None:
    pool = make_pool(workers=1)
    (first,) = pool.run(task, items("pid"))
    pool.close()
    assert not is_alive(int(first.value or 0))
    (second,) = pool.run(task, items("pid"))
    assert second.value not in (None, first.value)


def test_loading_is_not_charged_to_the_first_item(tmp_path: Path, make_pool: Callable[..., Pool]) -> None:
    path = tmp_path / "slow.py"
    path.write_text("import time\ntime.sleep(1.5)\ndef act(completion): return 1\n")
    assert make_pool(deadline=0.5).run(FunctionFile(str(path), "act"), items("a")) == [Graded(1.0)]


@pytest.mark.parametrize("word", ["note {}", "pid"], ids=["at work", "idle"])
def test_processes_end_when_the_parent_is_killed(word: str, task: FunctionFile, tmp_path: Path) -> None:
    # The unguarded script also shows that workers do not import the user's main module again.
    note, idle, main = tmp_path / "note", tmp_path / "idle", tmp_path / "main.py"
    main.write_text(
        "import sys, time\n"
        "from covary.rewards import FunctionFile, Pool\n"
        f"pool = Pool(workers=1, deadline=1.0)\n"
        f"task = FunctionFile({task.path!r}, 'act')\n"
        f"(pid,) = pool.run(task, [('pid', None, {{}})])\n"
        f"open({str(idle)!r}, 'w').write(str(int(pid.value)))\n"
        f"if {word != 'pid'}:\n"
        f"    pool.deadline = 2.0\n"
        f"    pool.run(task, [({word.format(note)!r}, None, {{}})])\n"
        "time.sleep(1000)\n"
    )
    process = subprocess.Popen([sys.executable, str(main)])
    awaited = idle if word == "pid" else note
    assert wait_for(lambda: awaited.exists() and awaited.read_text() != "", 30)
    worker = int(awaited.read_text())
    assert is_alive(worker)
    process.kill()
    process.wait()
    assert wait_for(lambda: not is_alive(worker), 15)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells memory and open files")
def test_nothing_leaks_over_ten_thousand_items(make_pool: Callable[..., Pool]) -> None:
    """One worker grades them all, hostile ones among them; neither it nor this process grows."""
    pool = make_pool(workers=1, deadline=60)

    def batch(start: int) -> list[Graded]:
        texts = [rf"\boxed{{{i} + x^2}}" if i % 2 else "{" * 2000 + str(i) for i in range(start, start + 1000)]
        return pool.run(Grader("math"), [(text, str(i), {}) for i, text in enumerate(texts)])

    def pages() -> list[int]:
        children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
        return [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in ["self", *children]]

    batch(0)
    batch(1000)
    before, files = pages(), len(os.listdir("/proc/self/fd"))
    for start in range(2000, 12_000, 1000):
        assert all(graded.error is None for graded in batch(start))
    after = pages()
    assert len(after) == len(before)  # no worker was replaced, none was left behind
    assert max(b - a for a, b in zip(before, after, strict=True)) * os.sysconf("SC_PAGE_SIZE") < 64 << 20
    assert len(os.listdir("/proc/self/fd")) == files


def test_closing_ends_a_run_of_another_thread_at_once(task, make_pool, tmp_path) -> None:
    """As Ctrl-C does while completions are graded ahead of time: nobody waits for what is left to grade."""
    pool, note = make_pool(workers=1), tmp_path / "pid"
    failed: list[BaseException] = []

    def grade() -> None:
        try:
            pool.run(task, items(f"note {note}", *["hang"] * 50))
        except RunError as error:
            failed.append(error)

    thread = threading.Thread(target=grade)
    thread.start()
    assert wait_for(lambda: note.exists() and note.read_text() != "", 30)
    start = time.monotonic()
    pool.close()
    thread.join(5)
    assert time.monotonic() - start < 5  # one item alone would take ten seconds, and there are 51
    assert [str(error) for error in failed] == ["grading was ended before it was done"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)
    assert pool.run(task, items("four"))[0].value == 4.0
