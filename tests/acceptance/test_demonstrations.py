"""The two demonstrations: a change of communication fails, a refactor stays green.

Each takes the example with its reviewed snapshots, edits the training code as a colleague would,
and runs the README's command.
"""

import contextlib
import html
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
import running
from sessions import start_warm
from warm import WarmStarter

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def starter():
    """Return a process with the example's imports, which take as long as torch's."""
    starter = WarmStarter("transformers.models.llama.modeling_llama")
    with contextlib.closing(starter):
        yield starter


@pytest.fixture
def llama(pytester, starter, monkeypatch):
    """A copy of the example and its snapshots, and what edits and runs it."""
    start_warm(pytester, starter, monkeypatch)
    monkeypatch.setattr(running, "PYTHON", starter.python)
    return Llama(pytester)


class Llama:
    def __init__(self, pytester):
        self.pytester = pytester
        self.code = pytester.path / "examples" / "llama_training.py"
        for part in ("examples", "snapshots/examples"):
            shutil.copytree(
                ROOT / part,
                pytester.path / part,
                ignore=shutil.ignore_patterns("__pycache__"),
            )
        # As if this torch had recorded them: otherwise each first line says which did.
        for file in (pytester.path / "snapshots").rglob("*.comm"):
            first, rest = file.read_text().split("\n", 1)
            first = re.sub(r"torch [^,]+", f"torch {metadata.version('torch')}", first)
            file.write_text(f"{first}\n{rest}")
        pytester.makeini("[pytest]")

    def edit(self, old, new):
        source = self.code.read_text()
        assert source.count(old) == 1, f"{old!r} is not once in the example"
        self.code.write_text(source.replace(old, new))

    def snapshots(self):
        directory = self.pytester.path / "snapshots" / "examples" / "test_llama"
        return {file.name: file.read_text() for file in directory.iterdir()}

    def line_of(self, code):
        lines = self.code.read_text().splitlines()
        return next(number for number, line in enumerate(lines, start=1) if code in line)

    def run(self, *arguments, variant="untied"):
        command = ("--world-size", "4", "-p", "no:cacheprovider", "-k", f"[{variant}]")
        return self.pytester.runpytest_subprocess(*command, *arguments, "examples/test_llama.py")

    def failure(self, *arguments, **kwargs):
        result = self.run(*arguments, **kwargs)
        result.assert_outcomes(failed=1, deselected=1)
        return result.stdout.str()


def explanation(text):
    """The lines of the explanation, including those that do not fit into the assertion."""
    first = text.index("E       assert comm_mode and fsdp_tree differ")
    lines = text[first:].splitlines()
    shown = [
        line.removeprefix("E").strip().removeprefix("assert ")
        for line in lines[: next(n for n, line in enumerate(lines) if not line.startswith("E"))]
    ]
    if not shown[-2].endswith(" below"):
        return shown
    below = re.search(r"^-+ comparison -+\n((?:  .*\n)+)", text, flags=re.MULTILINE)[1]
    return [*shown[:-2], *(line.strip() for line in below.splitlines()), shown[-1]]


@pytest.mark.release
def test_the_unchanged_example_passes(llama):
    result = llama.run(variant="tied] or [untied")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["4 snapshots passed."])


HEAD = (
    "comm_mode and fsdp_tree differ from "
    "snapshots/examples/test_llama/test_train_step[untied].ws4 (2 files)"
)
ACCEPT = (
    "accept: pytest --snapshot-update --world-size=4 "
    '"examples/test_llama.py::test_train_step[untied]"'
)
# A block has 36,992 float32 parameters: q and o 64x64, k and v 32x64, three 64x128, two norms
# of 64.
# lm_head has 512x64, the root without it the embedding's 512x64 and a norm of 64.


def test_unsharded_block_is_named_in_both_comparisons(llama):
    llama.edit(
        "fully_shard(block, mesh=mesh)",
        "fully_shard(block, mesh=mesh, reshard_after_forward=block.self_attn.layer_idx != 2)",
    )
    assert explanation(llama.failure()) == [
        HEAD,
        "model.layers.2 no longer resharded after forward, so not gathered again in "
        "backward: -1 call, -144.5 KiB",
        "tree: model.layers.2: reshard_after_forward True -> False",
        "likely: reshard_after_forward True -> False, as the tree shows",
        "cost: -10 % bytes in all_gather[dp] (1.4 -> 1.2 MiB per rank), -6.4 % in all, "
        "peak gathered unchanged",
        ACCEPT,
    ]


def test_lm_head_gathered_per_loss_chunk_is_explained(llama):
    llama.edit(
        "    fully_shard(model, mesh=mesh)",
        "    fully_shard(model.lm_head, mesh=mesh)\n    fully_shard(model, mesh=mesh)",
    )
    text = llama.failure()
    lines = explanation(text)
    assert lines[0] == HEAD
    # Issued in the loop over the chunks.
    line = llama.line_of("functional.cross_entropy(self.lm_head(part)")
    assert lines[1] == (
        "lm_head split off from unit (root), gathered 4 times in forward: "
        "8 calls, 1.0 MiB in total, at "
        f"examples/llama_training.py:{line}"
    )
    assert lines[2] == "tree: lm_head: is now a unit (fsdp2)"
    assert lines[3] == (
        "likely: called several times in one forward, e.g. by a loop or a chunked loss: leave it "
        "in its parent's unit, or set its reshard_after_forward to False"
    )
    assert lines[4].startswith("cost: +63 % bytes in all_gather[dp] (1.4 -> 2.3 MiB per rank")
    assert lines[5:] == ["cost: reduce_scatter[dp] 5 -> 6 calls", ACCEPT]
    # In the picture, lines are broken at spaces, and each begins with pytest's E.
    picture = (ROOT / "docs" / "pictures" / "failure.svg").read_text()
    drawn = html.unescape("".join(re.findall(r"<text[^>]*>(.*?)</text>", picture)))
    drawn, *said = (re.sub(r"[\sE]", "", text) for text in (drawn, *lines))
    assert [line for line in said if line not in drawn] == [], "run: python docs/draw_failure.py"
    page = (ROOT / "docs" / "causes.md").read_text()
    _, example, *_ = page.partition("\n## Cost\n")[2].split("```")
    costs = example.splitlines()[1:]
    assert len(costs) == 2
    complete = llama.failure("-vv")
    assert [line for line in costs if line not in complete] == []


def test_a_missing_root_unit_is_explained(llama):
    llama.edit("    fully_shard(model, mesh=mesh)\n", "")
    lines = explanation(llama.failure())
    assert lines[0] == HEAD
    assert lines[-1].endswith(ACCEPT.partition(": ")[2])
    assert (
        "likely: fully_shard on the root is missing: its parameters are not sharded, FSDP does not "
        "reduce their gradients, and each unit below becomes a root"
    ) in lines
    assert (
        "breaks training: (root) no longer gathered or reduced, gathers of other units unchanged "
        "in forward" in lines
    )


def test_accept_command_of_failure_accepts_change(llama):
    llama.edit(
        "fully_shard(block, mesh=mesh)",
        "fully_shard(block, mesh=mesh, reshard_after_forward=False)",
    )
    text = llama.failure()
    command = next(line for line in text.splitlines() if "accept:" in line).split("accept: ")[1]
    before = llama.snapshots()
    # As pasted into a shell, from where the user ran pytest.
    python = f"{running.PYTHON} -m pytest -p no:cacheprovider"
    accepted = subprocess.run(  # noqa: S602  # as above
        command.replace("pytest", python, 1), shell=True, cwd=llama.pytester.path, check=False
    )
    assert accepted.returncode == 0
    after = llama.snapshots()
    assert before.keys() == after.keys()
    assert sorted(name for name in before if before[name] != after[name]) == [
        "test_train_step[untied].ws4.comm",
        "test_train_step[untied].ws4.tree.comm",
    ]
    llama.run().assert_outcomes(passed=1, deselected=1)


REFACTORS = {
    "a class renamed": [
        (
            "class ChunkedLossLlama(LlamaForCausalLM)",
            "class LlamaWithChunkedLoss(LlamaForCausalLM)",
        ),
        ("return ChunkedLossLlama(config)", "return LlamaWithChunkedLoss(config)"),
    ],
    "modules built in another order": [
        (
            "    return ChunkedLossLlama(config)",
            "    model = ChunkedLossLlama(config)\n"
            "    for module in (model, model.model, *model.model.layers):\n"
            "        module._modules = dict(reversed(module._modules.items()))\n"
            "    return model",
        )
    ],
    "logging under no_grad": [
        (
            "    optimizer.step()\n",
            "    with torch.no_grad():\n"
            "        shards = [p.grad.to_local() for p in model.parameters()]\n"
            "        print('local gradient norm', torch.nn.utils.get_total_norm(shards))\n"
            "    optimizer.step()\n",
        )
    ],
}


@pytest.mark.parametrize(
    "edits",
    [
        pytest.param(
            edits, id=name, marks=[pytest.mark.release] * (name != "modules built in another order")
        )
        for name, edits in REFACTORS.items()
    ],
)
def test_refactors_stay_green(llama, edits):
    for old, new in edits:
        llama.edit(old, new)
    llama.run().assert_outcomes(passed=1, deselected=1)
