"""What ranks shared is removed, even where one that was killed still writes."""

import threading

import pytest

from pytest_fsdp_comm.ranks.start import ending
from pytest_fsdp_comm.ranks.start.ending import remove_directory


@pytest.fixture
def directory(tmp_path):
    directory = tmp_path / "session"
    directory.mkdir()
    return directory


def test_remove_directory_while_files_are_written(directory, monkeypatch):
    rmtree = ending.shutil.rmtree
    writes = iter(range(3))

    def rmtree_while_another_writes(path, **options):
        rmtree(path, **options)
        for number in writes:
            # As if between the removal of its files and its own.
            path.mkdir()
            (path / f"rank{number}.stdout").touch()
            break

    monkeypatch.setattr(ending.shutil, "rmtree", rmtree_while_another_writes)
    remove_directory(directory)
    assert not directory.exists()
    assert next(writes, None) is None


def test_a_directory_that_cannot_be_removed_is_left(directory, monkeypatch):
    monkeypatch.setattr(ending.shutil, "rmtree", lambda *_, **__: None)
    remove_directory(directory)  # returns
    directory.rmdir()


def test_two_processes_may_remove_the_same_directory(directory):
    removing = [threading.Thread(target=remove_directory, args=(directory,)) for _ in range(2)]
    for thread in removing:
        thread.start()
    for thread in removing:
        thread.join()
    assert not directory.exists()
