"""`fsdp-comm record` records an unchanged script, and does not change how it runs."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import running

from pytest_fsdp_comm.ranks.wire.load import extend_under_load

# Prints all that a script can see of how it was started; torch reads the variable when it is
# imported, if not by pytest or for a simulated rank, and the encoding is the terminal's. It ends
# late: a thread of gloo holds the context of a backward (torch 2.13: c10d's AsyncWork and its
# ThreadLocalState), and aborts the process if it drops it while Python ends, 4 of 60 times on two
# busy cores without the plugin.
SCRIPT = """
import atexit, os, pickle, sys, time
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
simulated = os.environ.get("WORLD_SIZE") in ("8192", None)
assert "torch" not in sys.modules or "pytest" in sys.modules or simulated
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import beside

class Here: ...

def say(*what):
    if dist.get_rank() == 0:
        print(*what, flush=True)

def main():
    torch.manual_seed(0)
    if "fail" not in sys.argv:
        atexit.register(lambda: print("has a group:", dist.is_initialized(), file=sys.stderr))
    dist.init_process_group()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    batches = 2 if "--lr" in sys.argv else int(sys.argv[-1])
    say(sys.argv, __name__, __file__, sys.path[0], beside.VALUE, sys.stdout.encoding)
    say(type(pickle.loads(pickle.dumps(Here()))), sorted(os.environ.keys() - {"_"}))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(5):
        for _ in range(batches):
            model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        say("step", step + 1)
    if "fail" in sys.argv:
        raise ZeroDivisionError("the script's")
    dist.destroy_process_group()
    time.sleep(1)
    sys.exit(7 if "exit" in sys.argv else 0)

if __name__ == "__main__":
    main()
"""
FSDP_COMM = ("-m", "pytest_fsdp_comm")
RECORD = (*FSDP_COMM, "record")
RANKS = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d")
ENDPOINT = ("--rdzv-endpoint", "localhost:0")
# Ranks of a new Python, in which nothing is imported before the script.
NEW_RANKS = {"PYTHON_EXEC": sys.executable}
# A layer of 64 x 64 weights and 64 biases, of 4 bytes.
LAYER = (64 * 64 + 64) * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    (folder / "src").mkdir()
    (folder / "src" / "train.py").write_text(SCRIPT)
    (folder / "src" / "beside.py").write_text("VALUE = 1")
    return folder


def run(folder, *arguments, python=None, **environment):
    """Run Python, by default one that has imported torch, as have the ranks that it starts."""
    python = python or running.PYTHON
    # A fixture of the module is made before those that take away CI and pytest's own.
    given = {name: os.environ[name] for name in os.environ if not re.match("CI$|PYTEST_", name)}
    given |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHON_EXEC": python}
    return subprocess.run(
        [python, *arguments],
        cwd=folder,
        env=given | environment,
        capture_output=True,
        encoding="utf-8",
        errors="surrogateescape",
        timeout=extend_under_load(300),
        check=False,
    )


def forward_of(path):
    return [line for line in path.read_text().splitlines() if line.startswith("forward {0,2} all")]


@pytest.fixture(scope="module")
def recorded(folder):
    """A step of two micro-batches, on two ranks, by a launcher."""
    command = (*RANKS, *ENDPOINT, *RECORD, "src/train.py", "--out", "x", "2")
    done = run(folder, *command, **NEW_RANKS)
    assert done.returncode == 0, done.stderr
    return done


def test_record_writes_step_like_test_and_ends_script(folder, recorded):
    assert forward_of(folder / "step.comm") == [
        f"forward {{0,2}} all_gather[dp] x2 of {LAYER:_} B float32 parameters"
    ]
    assert "unit {0,2} fsdp2 shard=dp" in (folder / "step.tree.comm").read_text()
    assert recorded.stdout.splitlines()[-1] == "step 2"
    assert "has a group: False" in recorded.stderr
    assert "has a group: True" not in recorded.stderr
    (line,) = [line for line in recorded.stderr.splitlines() if "fsdp-comm" in line]
    assert line.startswith("fsdp-comm: step 3 of src/train.py: 2 ranks; 8 all_gather[dp]")
    assert line.endswith("Wrote step.comm, step.json, step.tree.comm")
    assert {file.name for file in folder.iterdir()} >= {"src", "step.comm", "step.json"}
    assert not [*folder.glob(".*ranks")]


def test_the_script_sees_what_it_sees_without(folder, recorded):
    plain = run(folder, *RANKS, *ENDPOINT, "src/train.py", "--out", "x", "2", **NEW_RANKS)
    assert plain.returncode == 0, plain.stderr
    as_ours, as_plain = (done.stdout.splitlines() for done in (recorded, plain))
    assert len(as_plain) == 2 + 5
    assert as_ours == as_plain[: len(as_ours)]


APART = """
import os, torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
model = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
for layer in model:
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters())
for step in range(3):
    x = torch.ones(2, 8)
    for layer in model if dist.get_rank() == 0 else reversed(model):
        x = layer(x)
    x.sum().backward()
    optimizer.step()
"""


def test_record_of_diverging_ranks_writes_no_snapshot(folder):
    (folder / "apart.py").write_text(APART)
    done = run(folder, *RECORD, "--nproc", "2", "--out", "apart.comm", "apart.py")
    assert done.returncode != 0
    line = "ranks diverge at call #1 over dp: rank 0 gathers 0, rank 1 gathers 1"
    assert f"nothing was written, because {line}" in done.stderr
    assert not [*folder.glob("apart*.comm"), *folder.glob("apart*.json")]


@pytest.mark.release
def test_a_script_that_goes_on_keeps_its_end(folder):
    own = ("--nproc", "2", "--go-on", "--step", "3-4", "--out", "on.comm")
    done = run(folder, *RECORD, *own, "-m", "src.train", "exit", "1", PYTHONPATH="src")
    assert done.returncode == 1, done.stderr  # the launcher's, of ranks that fail
    assert re.search(r"exitcode\s*: 7", done.stderr)
    assert done.stdout.splitlines()[-1] == "step 5"
    assert "fsdp-comm: steps 3-4 of src.train: 2 ranks" in done.stderr
    assert forward_of(folder / "on.comm") == [
        f"forward {{0,2}} all_gather[dp] x2 of {LAYER:_} B float32 parameters"
    ]


def test_an_error_is_the_scripts_own(folder):
    group = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    plain = run(folder, "src/train.py", "fail", "1", python=sys.executable, **group)
    own = (*RECORD, "--go-on", "--out", "failed.comm")
    ours = run(folder, *own, "src/train.py", "fail", "1", python=sys.executable, **group)
    assert plain.returncode == ours.returncode == 1
    assert plain.stdout == ours.stdout
    # The path is printed when the file is written, before or after the error.
    told = re.sub("^fsdp-comm: .*\n", "", ours.stderr, flags=re.MULTILINE)
    said = told[told.index("Traceback") :]
    assert said == plain.stderr[plain.stderr.index("Traceback") :]
    assert said.endswith("ZeroDivisionError: the script's\n")
    assert (folder / "failed.comm").exists()


@pytest.mark.parametrize("needs", ["torch.ones(1, device='cuda')", "init_process_group('nccl')"])
def test_script_that_needs_gpus_gets_a_hint(tmp_path, needs):
    script = f"import torch\nfrom torch.distributed import *\n{needs}\n"
    (tmp_path / "train.py").write_text(script)
    group = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    done = run(tmp_path, *RECORD, "train.py", **group, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert done.stderr.endswith(
        "fsdp-comm: to record this script without GPUs, simulate one of its ranks: pass "
        "--world-size N instead of --nproc\n"
    )


def test_simulated_script_that_needs_gpus_gets_no_hint(tmp_path):
    (tmp_path / "train.py").write_text("raise RuntimeError('Found no NVIDIA driver')\n")
    done = run(tmp_path, *RECORD, "--world-size", "8", "train.py")
    assert done.returncode == 1
    assert done.stderr.endswith("RuntimeError: Found no NVIDIA driver\n")


def test_one_simulated_rank_sends_what_thousands_do(folder):
    size = ("--world-size", "8192", "--rank", "7", "--out", "large.comm")
    done = run(folder, *RECORD, *size, "src/train.py", "1")
    assert done.returncode == 0, done.stderr
    # Each parameter's 64 rows are a row of each of 8192 ranks.
    padded = (8192 * 64 + 8192) * 4
    lines = (folder / "large.comm").read_text().splitlines()
    gather = f"all_gather[dp] x1 of {padded:_} B float32 parameters"
    # Nothing runs before the first gather.
    assert {f"forward 0 {gather} exposed", f"forward 2 {gather}"} <= {*lines}
    assert "world_size 8192\nranks 7\n" in (folder / "large.comm").read_text()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--step", "2", "src/train.py", "1"], "expected steps from 3 on, such as 3 or 3-4, got 2"),
        pytest.param(
            ["--nproc", "2", "--step", "4-3", "src/train.py", "1"],
            "expected steps from 3 on",
            marks=pytest.mark.release,
        ),
        (["--step", "9", "src/train.py", "1"], "the script ended after 5 optimizer steps in"),
        (["src/beside.py"], "the script ended after 0 optimizer steps in this process, before"),
    ],
)
def test_record_unsupported_is_error_with_remedy(folder, arguments, text):
    group = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    done = run(folder, *RECORD, *arguments, **group)
    assert done.returncode == 2
    assert f"\nfsdp-comm: {text}" in f"\n{done.stderr}"
    assert "has a group: True" not in done.stderr
    assert ("step 5" in done.stdout) == ("9" in arguments)


def test_record_without_launcher_suggests_nproc(folder):
    done = run(folder, *RECORD, "src/train.py", "1")
    assert done.returncode == 1
    assert "to start 4 ranks, pass --nproc 4\n" in done.stderr


@pytest.mark.release
def test_a_rank_says_itself_what_failed_on_it(folder):
    for rank, whose in (("0", ""), ("3", "rank 3: ")):
        done = run(folder, *RECORD, "src/beside.py", RANK=rank, WORLD_SIZE="4")
        assert done.returncode == 2
        assert done.stderr.startswith(f"fsdp-comm: {whose}the script ended after 0 optimizer steps")


@pytest.mark.parametrize(
    "ending",
    [
        "os.kill(os.getpid(), signal.SIGINT)",
        pytest.param("sys.exit('text')", marks=pytest.mark.release),
        pytest.param("1 / 0", marks=pytest.mark.release),
        "print(2)",
    ],
)
def test_record_script_without_step_keeps_exit_status(folder, ending):
    script = folder / "src" / "ends it.py"
    script.write_text(
        "import atexit, os, signal, sys\natexit.register(print, 'late')\nprint(1, flush=True)\n"
        f"def main():\n    {ending}\nmain()\n"
    )
    plain = run(folder, str(script), python=sys.executable)
    ours = run(folder, *RECORD, "--force", str(script), python=sys.executable)
    assert ours.stdout == plain.stdout
    assert ours.stderr.startswith(plain.stderr)
    said = ours.stderr.removeprefix(plain.stderr)
    if plain.returncode:
        assert (ours.returncode, said) == (plain.returncode, "")
    else:
        assert (ours.returncode, said[:29]) == (2, "fsdp-comm: the script ended a")


def test_record_page_commands_detect_regression(tmp_path):
    (tmp_path / "beside.py").write_text("VALUE = 1")
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "record.md").read_text()
    commands = "".join(re.findall(r"(?ms)^```shell\n(.*?)^```$", page)).splitlines()
    # Of two ranks, for the sake of time.
    shown = [line.replace("--nproc 4", "--nproc 2").replace("ws4", "ws2") for line in commands]
    record, show, test, diff = ((*FSDP_COMM, *shlex.split(line)[1:]) for line in shown)
    pytest_run = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
    said = [run(tmp_path, *command) for command in (record, show, test, pytest_run, diff)]
    assert [done.returncode for done in said] == [0] * 5, said
    assert "Wrote step.comm, step.json, step.tree.comm" in said[0].stderr
    assert "all_gather[dp]" in said[1].stdout
    assert said[4].stdout == ""

    kept = "fully_shard(layer, mesh=mesh, reshard_after_forward=False)"
    script.write_text(SCRIPT.replace("fully_shard(layer, mesh=mesh)", kept))
    forced = (*record[:3], "--force", *record[3:])
    commands = (pytest_run, record, forced, diff)
    failed, refused, again, told = (run(tmp_path, *command) for command in commands)
    assert [done.returncode for done in (failed, again, told)] == [1, 0, 1], again.stderr
    assert refused.returncode == 1  # the launcher's
    assert "would change. Pass --force to replace the files" in refused.stderr
    # Two layers, of two micro-batches.
    story = "modules {0,2} no longer resharded after forward, so not gathered again in backward"
    assert story in failed.stdout
    assert story in told.stdout
    assert "{0,2}: reshard_after_forward True -> False" in told.stdout
    assert run(tmp_path, *diff[:-1], "no.json").returncode == 2


# Sends `seen` elements, and, unless it is 0, `unseen` elements past the recorder.
SMALL = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group()
model = fully_shard(nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters())
unseen, seen = map(int, sys.argv[1:])
for _ in range(4):
    model(torch.ones(2, 4)).sum().backward()
    if unseen:
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        backend.allreduce([torch.ones(unseen)]).wait()
    dist.all_reduce(torch.ones(seen))
    optimizer.step()
    optimizer.zero_grad()
"""
GITHUB = {
    "GITHUB_ACTIONS": "true",
    "GITHUB_SERVER_URL": "https://github.example",
    "GITHUB_REPOSITORY": "owner/name",
    "GITHUB_SHA": "0123abc",
}
RANK = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


def test_record_keeps_reviewed_files(tmp_path):
    """It replaces no file of an earlier step unless told to, and none at all after a gap."""
    (tmp_path / "small.py").write_text(SMALL)

    def record(*arguments):
        is_at_risk = bool(files()) and not {"--force", "--out"}.intersection(arguments)
        done = run(tmp_path, *RECORD, *arguments, **RANK)
        said = [line for line in done.stderr.splitlines() if line.startswith("fsdp-comm: ")]
        # It names the risk of losing a recording before the script runs for minutes.
        assert is_at_risk == said[0].startswith("fsdp-comm: step.comm exists: if the new recording")
        return done.returncode, said[-1].removeprefix("fsdp-comm: ")

    def files():
        return {file.name: file.read_text() for file in tmp_path.glob("*step*")}

    assert record("small.py", "0", "8")[0] == 0
    first = files()
    assert first.keys() == {"step.comm", "step.json", "step.tree.comm"}
    # An equal recording changes nothing, so it is no reason to stop.
    assert record("small.py", "0", "8")[0] == 0
    assert files() == first
    assert record("small.py", "0", "16") == (
        2,
        "nothing was written, because step.comm and step.json would change. Pass --force to "
        "replace the files, or --out other.comm to keep them",
    )
    assert record("small.py", "00", "8") == (
        2,
        "nothing was written, because step.json would change (it also has lines of code and the "
        "script's arguments). Pass --force to replace the files, or --out other.comm to keep them",
    )
    assert files() == first
    for options in (["--force"], ["--out", "new-step.comm"]):
        status, text = record(*options, "small.py", "8", "16")
        assert status == 2
        assert text.startswith("nothing was written, because the recording is incomplete: 1 coll")
    assert files() == first
    assert record("--force", "small.py", "0", "16")[0] == 0
    second = files()
    assert {name for name in first if first[name] != second[name]} == {"step.comm", "step.json"}
    assert second.keys() == first.keys()


def test_any_directory_is_recorded_and_guarded(tmp_path):
    """Its name has spaces and is not UTF-8; CI's variables must not hide what fails there."""
    folder = tmp_path / os.fsdecode(b"my caf\xe9")
    folder.mkdir()
    (folder / "train model.py").write_text(SMALL)
    settings = "filterwarnings = error\naddopts = --strict-config -p no:cacheprovider"
    (folder / "pytest.ini").write_text(f"[pytest]\n{settings}\n")
    recorded = run(folder, *RECORD, "train model.py", "0", "8", **RANK)
    assert recorded.returncode == 0, recorded.stderr
    assert run(folder, *FSDP_COMM, "test", "step.json").returncode == 0
    pytest_run = ("-m", "pytest", "-Wdefault", "--comm-artifacts=ci", "--comm-report=report")
    github = GITHUB | {"GITHUB_WORKSPACE": str(tmp_path)}
    test = folder / "test_train_model.py"
    test.write_text(test.read_text().replace('"8"', '"16"'))
    failed = run(folder, *pytest_run, **github, GITHUB_STEP_SUMMARY=str(folder / "summary.md"))
    assert failed.returncode == 1, failed.stdout
    change = "all_reduce[world]"
    assert change in failed.stdout
    assert "::error file=my caf\\udce9/train model.py,line=17," in failed.stdout
    assert change in (folder / "summary.md").read_text()
    assert "/my%20caf%E9/test_train_model.py#L" in (folder / "summary.md").read_text()
    assert (folder / "report/index.html").is_file()
    accepted = run(folder, *FSDP_COMM, "accept", "ci")
    assert (accepted.returncode, accepted.stdout.splitlines()[-1]) == (0, "1 file accepted")
    assert run(folder, *pytest_run).returncode == 0


GPU_PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "gpu-script.md"


@pytest.mark.release
def test_gpu_page_prints_what_its_commands_print(tmp_path):
    page = GPU_PAGE.read_text()
    (script,) = re.findall(r"(?ms)^```python no-run\n(.*?)^```$", page)
    (snapshot,) = re.findall(r"(?ms)^```text\n(.*?)^```$", page)
    (tmp_path / "train.py").write_text(script)
    for command, printed in re.findall(r"(?ms)^```console\n\$ (.*?)\n(.*?)^```$", page):
        done = run(tmp_path, *FSDP_COMM, *shlex.split(command)[1:])
        assert (done.returncode, done.stdout + done.stderr) == (0, printed)
    assert {*snapshot.splitlines()} <= {*(tmp_path / "step.comm").read_text().splitlines()}


GPU_SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

if torch.accelerator.device_count() != 2 or not torch.cuda.is_bf16_supported():
    sys.exit("needs two GPUs")
device = torch.device(torch.accelerator.current_accelerator().type, int(os.environ["LOCAL_RANK"]))
torch.accelerator.set_device_index(device.index)
dist.init_process_group(dist.get_default_backend_for_device(device), device_id=device)
with torch.device("meta"):
    model = nn.Linear(48, 48, dtype=torch.bfloat16)
fully_shard(model)
model.to_empty(device=device)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
scaler = torch.amp.GradScaler("cuda")
for _ in range(4):
    scaler.scale(model(torch.zeros(8, 48, device=device, dtype=torch.bfloat16)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
dist.destroy_process_group()
"""


def test_gpu_script_is_recorded_and_guarded(tmp_path):
    (tmp_path / "train.py").write_text(GPU_SCRIPT)
    own = ("--world-size", "64", "--local-world-size", "2", "--rank", "5")
    done = run(tmp_path, *RECORD, *own, "train.py")
    assert done.returncode == 0, done.stderr
    assert "device_count" not in (tmp_path / "step.comm").read_text()
    # 48 rows are a row of each of 64 ranks, and biases as well.
    padded = 64 * (48 + 1) * 2
    assert (
        f"forward (root) all_gather[world] x1 of {padded:_} B bfloat16 parameters exposed\n"
        in (tmp_path / "step.comm").read_text()
    )
    assert run(tmp_path, *FSDP_COMM, "test", "step.json").returncode == 0
    passed = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert passed.returncode == 0, passed.stdout
    refused = run(tmp_path, *RECORD, "--force", "--world-size", "64", "train.py")
    assert (refused.returncode, refused.stderr) == (1, "needs two GPUs\n")


def test_refused_line_of_simulated_script_is_shown(tmp_path):
    script = GPU_SCRIPT.replace("!= 2", "!= 8").replace("    scaler.update()", "    save()")
    save = "def save():\n    import pickle\n    pickle.dumps(model.state_dict())\n"
    (tmp_path / "train.py").write_text(script.replace("for _ in", f"{save}for _ in"))
    done = run(tmp_path, *RECORD, "--world-size", "64", "train.py")
    assert done.returncode == 1
    # torch puts the rank before each line.
    frames = re.findall(r'File "(.*)", line \d+, in (\S+)', done.stderr)
    path = str(tmp_path / "train.py")
    assert frames == [(path, "<module>"), (path, "save")]
    assert "SimulationError: train.py:" in done.stderr.splitlines()[-1]
    # The user ran a command, not a test.
    assert done.stderr.endswith(
        "move the call out of the first steps, or record real ranks, with --nproc\n"
    )


SAVING_SCRIPT = """
import os
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

variables = "TORCHELASTIC_RUN_ID GROUP_RANK ROLE_RANK ROLE_WORLD_SIZE TORCHELASTIC_RESTART_COUNT"
print([os.environ[name] for name in variables.split()], dist.is_torchelastic_launched())
print("before", dist.is_initialized())
dist.init_process_group("cpu:gloo,cuda:nccl")
print("inside", dist.is_initialized(), dist.get_backend(), dist.get_backend_config())
dist.new_group([0, 1])
print("subgroup", dist.get_backend(dist.new_group([8, 9], backend="gloo")))
model = fully_shard(nn.Linear(8, 8, device="cuda"))
optimizer = torch.optim.AdamW(model.parameters())
options = StateDictOptions(full_state_dict=True, cpu_offload=True)
for step in range(3):
    model(torch.ones(2, 8, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    weights = get_model_state_dict(model, options=options)
    torch.save([weights, model.state_dict()], "weights.pt")
    torch.save({"step": step}, "step.pt")
    dist.barrier()
    dcp.save({"model": model.state_dict()}, checkpoint_id="checkpoint")
    dcp.async_save({"model": model.state_dict()}, checkpoint_id="checkpoint").result()
    print("saved", torch.load("step.pt")["step"])
    model.eval()
    model.train()
dist.destroy_process_group()
print("after", dist.is_initialized())
"""


def test_simulated_script_owns_its_group_and_saves(tmp_path):
    (tmp_path / "train.py").write_text(SAVING_SCRIPT)
    size = ("--world-size", "16", "--rank", "9", "--go-on")
    done = run(tmp_path, *RECORD, *size, "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "['none', '1', '9', '16', '0'] True",
        "before False",
        "inside True cpu:gloo,cuda:nccl cpu:gloo,cuda:nccl",
        "subgroup gloo",
        *(f"saved {step}" for step in range(3)),
        "after False",
    ]
    assert {path.name for path in tmp_path.iterdir()} == {
        *("train.py", "step.pt", "step.comm", "step.json", "step.tree.comm"),
    }
    saves = "torch.distributed.checkpoint"
    assert done.stderr.endswith(
        "fsdp-comm: note: a simulated rank has no data to save, so these calls wrote nothing: "
        f"train.py:25 (torch.save), train.py:28 ({saves}.save), train.py:29 ({saves}.async_save)\n"
    )
    evaluated = "fsdp-comm: note: the recording includes an evaluation, because the model's eval()"
    assert evaluated in done.stderr
    skipped = f"answered skipped to __main__:<module> ({saves}.save)"
    assert skipped in (tmp_path / "step.comm").read_text()


def test_simulated_script_may_create_group_by_mesh(tmp_path):
    script = SAVING_SCRIPT.partition('print("inside')[0].replace(
        'dist.init_process_group("cpu:gloo,cuda:nccl")',
        "print(dist.device_mesh.init_device_mesh('cuda', (4, 4)).size(), dist.get_rank())",
    )
    (tmp_path / "train.py").write_text(script)
    done = run(tmp_path, *RECORD, "--world-size", "16", "--rank", "9", "train.py")
    assert done.stdout.splitlines()[1:] == ["before False", "16 9"]
    assert done.stderr.startswith("fsdp-comm: rank 9: the script ended after 0 optimizer steps")


SPAWNING_SCRIPT = """
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

def train(gpu, num_gpus, host):
    torch.cuda.set_device(gpu)
    rank = host * num_gpus + gpu
    print("rank", rank, os.environ["RANK"])
    dist.init_process_group("nccl", init_method="tcp://a:1", rank=rank, world_size=16)
    model = DistributedDataParallel(nn.Linear(8, 8).cuda(gpu), DEVICES)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        model(torch.ones(2, 8).cuda(gpu)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

if __name__ == "__main__":
    num_gpus = torch.cuda.device_count()
    START
"""


@pytest.mark.parametrize(
    ("start", "devices"),
    [
        ("mp.spawn(train, args=(num_gpus, 1), nprocs=num_gpus)", "[gpu]"),
        pytest.param(
            "mp.spawn(train, (num_gpus, 1), num_gpus, join=False).join()",
            "[torch.device('cuda')]",
            marks=pytest.mark.release,
        ),
        (
            "mp.start_processes(train, args=(num_gpus, 1), nprocs=num_gpus, start_method='fork')",
            "[f'cuda:{gpu}'], output_device=gpu",
        ),
    ],
)
def test_simulated_script_spawns_only_this_rank(tmp_path, start, devices):
    script = SPAWNING_SCRIPT.replace("START", start).replace("DEVICES", devices)
    (tmp_path / "train.py").write_text(script)
    done = run(tmp_path, *RECORD, "--world-size", "16", "--rank", "9", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "rank 9 9\n"
    assert "16 ranks; 1 all_reduce[world], 288 B" in done.stderr


def test_simulated_script_spawns_other_number_error(tmp_path):
    start = "mp.spawn(train, args=(num_gpus, 0), nprocs=4)"
    (tmp_path / "train.py").write_text(SPAWNING_SCRIPT.replace("START", start))
    done = run(tmp_path, *RECORD, "--world-size", "16", "train.py")
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith(
        "SimulationError: train.py:23: expected one process for each of the 8 ranks of a host, "
        "got 4: pass --local-world-size 4"
    )


STARTING_SCRIPT = SPAWNING_SCRIPT.replace("torch.multiprocessing", "multiprocessing").replace(
    "    START",
    """\
    mp.set_start_method("METHOD")
    helper = mp.Process(target=print, args=("helper",))
    helper.start()
    helper.join()
    ranks = [mp.Process(target=train, args=(gpu, num_gpus, 0)) for gpu in range(num_gpus)]
    for rank in ranks:
        rank.start()
    END""",
)


@pytest.mark.parametrize(
    ("method", "end"),
    [
        pytest.param("fork", "for rank in ranks: rank.join()", marks=pytest.mark.release),
        pytest.param("spawn", "pass", marks=pytest.mark.release),
    ],
)
def test_simulated_script_starts_processes_error(tmp_path, method, end):
    """A script may wait for its ranks, or not."""
    script = STARTING_SCRIPT.replace("METHOD", method).replace("END", end)
    (tmp_path / "train.py").write_text(script.replace("DEVICES", "[gpu]"))
    size = ("--world-size", "2", "--local-world-size", "2")
    done = run(tmp_path, *RECORD, *size, "train.py")
    assert done.returncode == 2
    assert done.stdout.startswith("helper\n")
    problem = (
        "SimulationError: train.py:29: expected ranks that "
        "torch.multiprocessing.spawn starts, got a multiprocessing.Process that creates a process "
        "group or selects a GPU: use spawn, which runs only the simulated rank, or call the "
        "function of that process for the rank in LOCAL_RANK\n"
    )
    assert done.stderr.count(problem) == 2
    assert "\nfsdp-comm: the script ended after 0 optimizer steps" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
