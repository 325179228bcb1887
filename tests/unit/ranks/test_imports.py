"""Positions are read on a thread, which must not import what the main thread is importing."""

import importlib
import threading

from pytest_fsdp_comm.ranks.hangs.position import is_imported


def test_module_that_is_being_imported_is_not_imported(tmp_path, monkeypatch):
    text = "import threading\nbegun, end = threading.Event(), threading.Event()\n"
    (tmp_path / "slow_events.py").write_text(text)
    (tmp_path / "slow_module.py").write_text(
        "import slow_events\nslow_events.begun.set()\nslow_events.end.wait(60)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    events = importlib.import_module("slow_events")
    thread = threading.Thread(target=importlib.import_module, args=("slow_module",))
    thread.start()
    try:
        assert events.begun.wait(60)
        assert not is_imported("slow_module")
        assert not is_imported("threading", "slow_module")
    finally:
        events.end.set()
        thread.join()
    assert is_imported("threading", "slow_module")
    assert not is_imported("no_module_of_this_name")
