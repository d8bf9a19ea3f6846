"""Tests run beside each other: one thread each keeps them from fighting over the cores."""

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("quick", max_examples=25, deadline=None)
settings.register_profile("all", max_examples=300, deadline=None)


def pytest_configure(config: pytest.Config) -> None:
    """Properties are tried on fewer examples where the slow tests are left out. Ctrl-C is not ignored. What is cached
    on disk is of this run alone, and shared by its processes. A process that only distributes tests to others imports
    neither torch nor meshweave, so that the others start sooner."""
    if not hasattr(config, "workerinput"):
        os.environ["MESHWEAVE_CACHE"] = tempfile.mkdtemp(prefix="meshweave-tests-")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    settings.load_profile("quick" if config.option.markexpr == "not slow" else "all")
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":
        _prepare_to_run(config)


def _prepare_to_run(config: pytest.Config) -> None:
    import torch
    from tests import processes

    os.environ["OMP_NUM_THREADS"] = "1"  # else Lightning gives this process all cores
    torch.set_num_threads(1)
    config.pluginmanager.register(processes, "tests.processes")  # it has the fixture `start`


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ["MESHWEAVE_CACHE"], ignore_errors=True)


@pytest.hookimpl(tryfirst=True)  # before what is marked is left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Rows named by `slow_rows` beside their test are slow. UsageError for a row that there is not."""
    for item in items:
        for mark in item.iter_markers("slow_rows"):
            if item.callspec.id in mark.args:  # type: ignore[attr-defined]
                item.add_marker(pytest.mark.slow)
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        rows = {(item.nodeid.partition("[")[0], mark.args) for item in items for mark in item.iter_markers("slow_rows")}
        names = {item.nodeid for item in items}
        missing = [f"{test}[{row}]" for test, args in rows for row in args if f"{test}[{row}]" not in names]
        if missing:
            raise pytest.UsageError(f"slow_rows names rows that there are not: {', '.join(missing)}")


def pytest_collection_finish(session: pytest.Session) -> None:
    """What collection leaves (modules, tests: a million objects) lives until the end: no collection of garbage walks it
    again. A full one took half a second otherwise, and some tests ask for two."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # graphs are a hundred thousand objects that live as long as their test


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """What a test, or a trainer that it runs, leaves in the environment is not there for the next, nor are more
    threads: processes that have more of them than cores wait in every small op for many times as long as it takes."""
    import torch

    before = dict(os.environ)
    yield
    torch.set_num_threads(1)
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)
