"""The private names of pytest that ranks rely on, and what is said when one moves."""

import io
import types

import pytest
from _pytest.capture import CaptureManager, MultiCapture
from _pytest.config.argparsing import Parser
from _pytest.debugging import (
    PdbInvoke,
    PdbTrace,
    _enter_pdb,
    post_mortem,
    pytestPDB,
    wrap_pytest_function_for_tracing,
)
from _pytest.runner import SetupState
from _pytest.tmpdir import TempPathFactory

from pytest_fsdp_comm.errors import UpstreamChangedError
from pytest_fsdp_comm.ranks.rank.isolation import (
    hold_terminal,
    isolate_session,
    release_terminal,
    resolve_basetemp,
    unregister_parents_plugins,
)


@pytest.mark.upstream
def test_pytest_has_the_private_names_that_are_used(pytestconfig, tmp_path_factory, request):
    manager = CaptureManager("no")
    assert manager._method == "no"
    assert manager._global_capturing is None
    assert isinstance(tmp_path_factory, TempPathFactory)
    assert hasattr(tmp_path_factory, "_basetemp")
    assert resolve_basetemp(pytestconfig) == tmp_path_factory.getbasetemp()
    assert isinstance(request.session._setupstate, SetupState)
    assert callable(request.session._setupstate.teardown_exact)
    assert hasattr(Parser, "addoption")


@pytest.mark.upstream
def test_debugger_entries_use_the_replaced_names():
    # Every way into a debugger makes it by this name.
    for user in (pytestPDB.set_trace.__func__, PdbInvoke.pytest_exception_interact):
        assert {"_init_pdb", "_enter_pdb"} & set(user.__code__.co_names)
    assert "_tw" in _enter_pdb.__code__.co_names
    assert "_init_pdb" in post_mortem.__code__.co_names
    assert "_init_pdb" in wrap_pytest_function_for_tracing.__code__.co_names
    assert PdbTrace.pytest_pyfunc_call
    # What pytest calls around a debugger.
    for name in ("suspend_capturing", "resume_capturing", "start_capturing"):
        assert callable(getattr(MultiCapture, name))
    assert "in_" in MultiCapture.suspend_capturing.__code__.co_varnames
    for name in ("suspend_global_capture", "resume_global_capture"):
        assert "_global_capturing" in getattr(CaptureManager, name).__code__.co_names
    assert "_method" in CaptureManager.is_globally_capturing.__code__.co_names


class Manager(types.SimpleNamespace):
    def getplugin(self, name):
        assert name == "capturemanager"
        return self.capture

    def has_plugin(self, name):
        assert name == "tmpdir"
        return self.has_tmpdir


def test_names_that_moved_are_named(tmp_path):
    config = types.SimpleNamespace(
        pluginmanager=Manager(capture=types.SimpleNamespace()),
        _tmp_path_factory=types.SimpleNamespace(),
    )
    with pytest.raises(UpstreamChangedError) as caught:
        isolate_session(config, basetemp=tmp_path)
    assert f"pytest {pytest.__version__} no longer has CaptureManager._global_capturing" in str(
        caught.value
    )
    config.pluginmanager.capture = None
    with pytest.raises(UpstreamChangedError, match=r"no longer has TempPathFactory\._basetemp,"):
        isolate_session(config, basetemp=tmp_path)
    with pytest.raises(UpstreamChangedError, match=r"no longer has config\._tmp_path_factory,"):
        resolve_basetemp(types.SimpleNamespace(pluginmanager=Manager(has_tmpdir=True)))
    resolve_basetemp(types.SimpleNamespace(pluginmanager=Manager(has_tmpdir=False)))


def test_what_a_silent_process_writes_is_held(pytester):
    pytester.makepyfile("def test_it(): pass")
    config = pytester.parseconfigure("-p", "no:asyncio")  # which warns of its own settings
    writer = config.get_terminal_writer()
    terminal = writer._file = io.StringIO()
    hold_terminal(config)
    config.pluginmanager.get_plugin("terminalreporter").write_line("told")
    assert terminal.getvalue() == ""
    release_terminal(config)
    writer.line("more")
    assert terminal.getvalue() == "told\nmore\n"


def test_a_terminal_that_moved_is_named(pytester, monkeypatch):
    config = pytester.parseconfigure("-p", "no:asyncio")  # which warns of its own settings
    monkeypatch.delattr(config.get_terminal_writer(), "_file")
    with pytest.raises(UpstreamChangedError, match=r"no longer has TerminalWriter\._file,"):
        hold_terminal(config)


def test_rank_ignores_maxfail_and_reruns(pytester):
    config = pytester.parseconfigure("-x", "-p", "no:asyncio")
    assert config.option.maxfail == 1
    for name in ("pytest_forked", "rerunfailures"):
        config.pluginmanager.register(object(), f"not-{name}")
        if not config.pluginmanager.has_plugin(name):
            config.pluginmanager.register(object(), name)
    unregister_parents_plugins(config)
    # Alone it would end fixtures that other ranks keep, or meet collectives of none.
    assert config.option.maxfail == 0
    for name in ("pytest_forked", "rerunfailures"):
        assert not config.pluginmanager.has_plugin(name)
        assert config.pluginmanager.has_plugin(f"not-{name}")
