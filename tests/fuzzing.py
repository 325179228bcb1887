"""Mutate snapshots of both kinds, and check that readers refuse them or read them exactly.

    python tests/fuzzing.py --mutations 1000000 --seed 7

A reader must either refuse a mutated text, with a short error that has file, line and remedy, or
return a value that differs from the original and is written as exactly this text.
"""

from __future__ import annotations

import argparse
import random
import re
import time
from collections import Counter
from functools import cache

from texts import parse_comm, parse_tree, parse_trees

from pytest_fsdp_comm.errors import SnapshotFormatError
from pytest_fsdp_comm.snapshots import comm_text, tree_text
from pytest_fsdp_comm.tree.profile import merge

COMM = (
    """\
# pytest-fsdp-comm 2 comm | torch 2.13.0, gloo (not compared)
world_size 8
mesh dp=4 stride 2
mesh odd=4 ranks 0,3,5-6 | 1-2,4,7
mesh pp_tp=2x2 stride 4x1
mesh t\\x20p=2 stride 1
forward (root) all_gather[dp] x1 of 262_400 B float32
forward layers.{0..3} all_gather[dp] x1 of 147_968 B bfloat16
forward layers.{0..2}.experts.{0..7} all_to_all[t\\x20p] x2 of 512 B float32 activations
forward layers.3.experts.{0..3} all_to_all[t\\x20p] x2 of 512 B float32
forward layers.3.experts.4 all_to_all[t\\x20p] x2 of 512 B float32 ranks 0,2-5
forward layers.3.experts.4 all_to_all[t\\x20p] x3 of 512 B float32 ranks 6
forward layers.{0..3} reshard x1
forward layers.{0..3} unshard x1
forward norm redistribute (Shard(dim=1))->(Replicate()) x1
backward (root) reduce_scatter[dp] x1 of 262_400 B float32 gradients
backward layers.{0..3} all_gather[dp] x1 of 8 B bfloat16 parameters ahead 1, x2 of 8 B float32
backward layers.{0..3} reduce_scatter[dp] x1 of 147_968 B float32 async
backward layers.{0,2} unshard x2 ranks 1
optimizer (no-module) all_reduce[dp] x1 of 4 B float32, x1 of 64 B float32
outside a\\x20b+c unknown:odd_op[dp] x1
outside (no-module) all_gather[dp] x2 of objects
outside (no-module) broadcast[odd] x1 of 8 B int64 root 0
outside (no-module) send[pp_tp] x2 of 8 B int64 peer -1, x1 of 8 B int64 peer +1
peak gathered 558_336 B ranks 0-6
peak gathered 1_000 B ranks 7
total all_gather[dp] x152 6_834_944 B and 16 of unknown size, sum of 8 ranks
total reduce_scatter[dp] x40 6_834_176 B, sum of 8 ranks
total all_reduce[dp] x16 544 B, sum of 8 ranks
total broadcast[odd] x8 64 B, sum of 8 ranks
total all_to_all[t\\x20p] x461 236_032 B, sum of 8 ranks
total send[pp_tp] x24 192 B, sum of 8 ranks
total unknown:odd_op[dp] x8 0 B, sum of 8 ranks
end
""",
    """\
# pytest-fsdp-comm 2 comm | torch 2.7.1, fake (not compared)
world_size 131072
ranks 0-511,1024
mesh world=131072 stride 1
async unknown
overlap known
answered cpu to train:Model.<locals>.step (torch.autocast)
answered 1.0 to train:Model.forward (item)
forward 0 broadcast[world] x1 of 1_000 B uint8 root 3 exposed ranks 0-510/2
forward 0 host_wait item x2 ranks 0-510/2
outside (no-module) barrier[world] x1
peak gathered 8 B ranks 0-505:2/8
peak gathered 4 B ranks 2,1024
total broadcast[world] x256 256_000 B, sum of 513 ranks
total barrier[world] x513 0 B, sum of 513 ranks
end
""",
    """\
# pytest-fsdp-comm 2 comm | torch 2.13.0, gloo (not compared)
world_size 4
mesh tp=4 stride 1
activation sizes not compared
forward layers.{0..3} all_reduce[tp] x1 of objects activations, x2 of float32 activations async
backward layers.{0..3} all_reduce[tp] x2 of 64 B float32 gradients in 2 of 4 backwards
outside (no-module) all_reduce[tp] x1 of 4 B float32 by max
total all_reduce[tp] x21 516 B and 12 of unknown size
end
""",
)
TREE = (
    """\
# pytest-fsdp-comm 2 tree | torch 2.13.0, gloo (not compared)
world_size 4
ranks 0,3
mesh dp=2 stride 2
mesh tp=2 stride 1
unit (root) fsdp2 root shard=dp reshard_after_forward=false
unit layers.{0..3} fsdp2 shard=dp replicate=tp reshard_after_forward=true param_dtype=bfloat16
unit layers.{4..5} fsdp1 shard=dp reshard_after_forward=2 cast_forward_inputs=false offload \
gradient_divide_factor=0.5 force_sum_reduction \
forward_prefetch=norm,(root) prefetch=BACKWARD_PRE,FORWARD
unit layers.{0..1} fsdp2 group=2 shard=dp reshard_after_forward=true
parameter embed.weight float32[512,64] frozen dp=Shard(0) tp=StridedShard(0,2) \
tied=a\\x20b,head.weight
parameter layers.{0..2}.experts.{0..7}.weight float32[64,64] dp=Shard(0)
parameter layers.3.experts.{0..3}.weight float32[64,64] dp=Shard(0)
parameter scale float8_e4m3fn[] unmanaged
total 9 units, 30 parameters
end
""",
)
_ONE, _OTHER = map(parse_tree, (TREE[0], TREE[0].replace("fsdp2 root", "fsdp2")))
_RANKS = merge({0: _ONE, 1: _OTHER, 3: _ONE}, backend="gloo", torch_version="2.13.0")
TREE = (*TREE, tree_text.format_profile(_RANKS))

TOKEN = re.compile(r"[A-Za-z_]+|[0-9]+|\s|.", re.DOTALL)
PIECES = [
    *("0", "1", "02", "\uff10\uff10", "x\uff11", "²", "-1", "1_0", "10_00"),
    *("9" * 18, "9" * 19, "9" * 5000),
    *("{0..3}", "{0,1}", "{3..0}", "{}", "{0..9999999}", "{0..999999999}", "{", "}", "..", ","),
    *("0-6/2", "0-13:2/4", ":1", "/2", "/1", "-7", ",2", "ranks 0-6/2", "ranks 0-99999999998/2"),
    *("ranks 0", " ranks 1-0", " ranks 0-99999999999", " ranks 1,0", " ranks 8", " ranks 0-7"),
    *("\0", "\t", "\x0b", "\x1b", "\x7f", "\x85", "\u2028", "\ufeff", "\u200b", "\r", "\r\n", "\n"),
    *("<<<<<<< HEAD\n", "=======\n", ">>>>>>> x\n", "||||||| y\n", "\n=======\n"),
    *(" ", "  ", "+", ".", "%20", "%41", "%", "\\x20", "\\x41", "\\", "(root)", "(no-module)", "#"),
    *("forward", "backward", "all_gather", "zzz", "unshard", "redistribute", "unknown:", "total"),
    *("ahead 1", " gradients", " async", " peer +1", " root 0", " of objects"),
    *(" by max", " in the last of 4 backwards", " in 2 of 4 backwards"),
    *(", x1 of 8 B int8", " stride 1"),
    *("mesh a=2x2 stride 4x1\n", "mesh a=2 ranks 0,3\n", "peak gathered 8 B\n", "async unknown\n"),
    *(" activations", " of float32", "activation sizes not compared\n"),
    *(" exposed", "overlap known\n", "forward a host_wait item x1\n"),
    *("end\n", "end", "mesh", "world_size", "world_size 0", "dp=0", "dp=4", "x0", "0 B", "frozen"),
    *("unit a fsdp2\n", "parameter a float32[1]\n", "forward a unshard x1\n", "[", "]", "root"),
    *("é", "\U0001f600", "a" * 300, "tied=", "group=1", "ranks 0\n", "ranks 1,2\n", "  end\n"),
]


def mutate(random_: random.Random, text: str, donor: str) -> str:
    """Change a text in one to three places, perhaps with lines of another text."""
    for _ in range(random_.choice((1, 1, 1, 2, 3))):
        text = random_.choice(MUTATIONS)(random_, text, donor)
    return text


def on_characters(random_: random.Random, text: str, _: str) -> str:
    """Remove, double or replace a few characters."""
    start = random_.randrange(len(text) + 1)
    end = min(len(text), start + random_.choice((0, 1, 1, 2, 5)))
    odd = random_.choice(PIECES)
    new = random_.choice(("", text[start:end] * 2, chr(random_.randrange(1, 0x250)), odd, odd, odd))
    return text[:start] + new + text[end:]


def on_tokens(random_: random.Random, text: str, _: str) -> str:
    """Replace a token with another token of the text, or with an odd piece."""
    tokens = TOKEN.findall(text)
    if tokens:
        tokens[random_.randrange(len(tokens))] = random_.choice(
            (random_.choice(tokens), random_.choice(PIECES))
        )
    return "".join(tokens)


def on_numbers(random_: random.Random, text: str, _: str) -> str:
    """Change a number a little."""
    matches = list(re.finditer(r"[0-9]+", text))
    if not matches:
        return text
    match = random_.choice(matches)
    number = int(match[0][:18]) + random_.choice((-1, 1, 1, 10))
    return text[: match.start()] + str(max(0, number)) + text[match.end() :]


def on_lines(random_: random.Random, text: str, donor: str) -> str:
    """Remove, double, swap or replace lines."""
    lines = text.splitlines(keepends=True) or [""]
    place, target = random_.randrange(len(lines)), random_.randrange(len(lines))
    action = random_.randrange(5)
    if action == 0:
        del lines[place]
    elif action == 1:
        lines.insert(target, lines[place])
    elif action == 2:  # swap
        lines[place], lines[target] = lines[target], lines[place]
    elif action == 3:  # replace
        lines[place] = random_.choice(donor.splitlines(keepends=True))
    else:
        cut = donor.splitlines(keepends=True)
        lines = lines[:place] + cut[random_.randrange(len(cut)) :]
    return "".join(lines)


def on_ends(random_: random.Random, text: str, _: str) -> str:
    """Truncate the text, or change line ends."""
    return random_.choice(
        (
            text[: random_.randrange(len(text) + 1)],
            text.replace("\n", "\r\n"),
            text.replace("\n", "\r"),
            text[random_.randrange(len(text) + 1) :],
            text.replace("\n", "\n\n", 1),
        )
    )


MUTATIONS = (on_characters, on_tokens, on_numbers, on_lines, on_ends)


READERS = {"comm": parse_comm, "tree": parse_trees}
WRITERS = {"comm": comm_text.format_profile, "tree": tree_text.format_profile}


@cache
def read_original(kind: str, text: str) -> object:
    """Parse a text that was not mutated."""
    return READERS[kind](text)


def check(kind: str, original: str, text: str) -> str:
    """Parse a mutated text; return ``refused``, ``same`` or ``other``."""
    try:
        value = READERS[kind](text, where="dir/x.comm")
    except SnapshotFormatError as error:
        check_error(str(error))
        return "refused"
    body = text.replace("\r\n", "\n").partition("\n")[2]
    assert WRITERS[kind](value).partition("\n")[2] == body, "its value is written differently"
    is_same = body == original.partition("\n")[2]
    assert (value == read_original(kind, original)) == is_same, "two texts have the same value"
    return "same" if is_same else "other"


def check_error(message: str) -> None:
    """Check that an error is short, and has file, line and remedy."""
    assert re.match(r"dir/x\.comm, line [1-9][0-9]*: ", message), message
    assert "git checkout" in message, message
    assert "--snapshot-update" in message, message
    assert len(message) < 700, message  # quotes of 200 characters, and the plugin's words
    assert message.isprintable(), message


def fuzz(kind: str, mutations: int, seed: int) -> Counter[str]:
    """Mutate the documents of a kind, and count the results of `check`.

    Raises:
        AssertionError: A check failed; the message has the text.
    """
    random_ = random.Random(seed)  # noqa: S311  # not for secrets
    documents = {"comm": COMM, "tree": TREE}[kind]
    results: Counter[str] = Counter()
    for _ in range(mutations):
        original = random_.choice(documents)
        text = mutate(random_, original, random_.choice((*COMM, *TREE)))
        try:
            results[check(kind, original, text)] += 1
        except Exception as error:
            raise AssertionError(f"{error!r} for {text!r}") from error
    return results


def main() -> None:
    """Fuzz both kinds, and print the counts of results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    for kind in ("comm", "tree"):
        started = time.process_time()
        results = fuzz(kind, arguments.mutations, arguments.seed)
        print(f"{kind}: {dict(results)} in {time.process_time() - started:.1f} s")  # noqa: T201  # its output


if __name__ == "__main__":
    main()
