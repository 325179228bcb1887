"""Failed assertions about findings print the findings, whatever their form."""

import pytest

from pytest_fsdp_comm.reports.assertions import explain_findings
from pytest_fsdp_comm.tree.finding import Finding, Findings
from pytest_fsdp_comm.tree.model import ModuleNode, ShardTree

LOST = Finding(
    code="partly-wrapped",
    level="warning",
    fqns=tuple(f"layers.{number}" for number in range(4)),
    reason="a reason of more than one line, since it has to say what is the case and why it hurts",
    cure="wrap them",
    nbytes=4096,
    count=4,
)
TEXT = """\
warning partly-wrapped (4 cases, 1.0 KiB each, 4.0 KiB in all):
    layers.{0..3}
  a reason of more than one line, since it has to say what is the
  case and why it hurts
  fix: wrap them"""
INDENTED = "\n".join(f"  {line}" for line in TEXT.splitlines())
SHORT = "<1 finding: partly-wrapped in layers.{0..3}>"


def tree(*findings):
    return ShardTree(
        rank=0,
        world_size=2,
        backend="gloo",
        torch_version="2.13.0",
        mesh_axes=(),
        modules=(ModuleNode(name="", parent=None, depth=0, class_name="Model"),),
        parameters=(),
        units=(),
        findings=findings,
    )


def explained(check):
    with pytest.raises(AssertionError) as caught:
        check()
    explain_findings(caught.value)
    text = str(caught.value)
    # A plugin may ask for the report of one failure again.
    explain_findings(caught.value)
    assert str(caught.value) == text
    return text


def test_finding_text_is_short_and_sums_costs():
    assert str(LOST) == str(Findings([LOST])) == TEXT
    assert LOST.cost == "4 cases, 1.0 KiB each, 4.0 KiB in all"
    one = Finding(code="padding", level="error", fqns=("",), reason="r", cure="c", nbytes=10)
    assert str(one) == "error padding (10 B): (root)\n  r\n  fix: c"
    assert str(tree(LOST, one)).endswith(f"[Model]\n{TEXT}\n{one}")


def test_findings_are_printable_and_equal_tuples():
    assert tree().findings == ()
    assert repr(tree().findings) == "()"
    assert not str(tree().findings)
    assert tree(LOST).findings == (LOST,)
    assert repr(tree(LOST).findings) == SHORT
    assert repr(tree(LOST)) == "<ShardTree of Model: 0 units, 0 parameters>"


def named(code, fqn):
    return Finding(code=code, level="error", fqns=(fqn,), reason="r", cure="c")


@pytest.mark.parametrize(
    ("findings", "text"),
    [
        ([named("a-code", "x" * 38)], f"<1 finding: a-code in {'x' * 38}>"),
        ([named("a-code", "x" * 39)], f"<1 finding: a-code in {'x' * 35}...>"),
        ([named("a" * 31, "x"), named("b", "y")], f"<2 findings: {'a' * 31} in x; b in y>"),
    ],
)
def test_a_repr_fits_into_a_line_after_the_assert(findings, text):
    assert repr(Findings(findings)) == text
    assert len(f"E       assert not {text}") <= 80


def test_where_the_findings_come_from_is_left_out():
    def named():
        subject = tree(LOST)
        assert not subject.findings

    def made_here():
        assert not tree(LOST).findings

    for check in (named, made_here):
        assert explained(check) == f"assert not {SHORT}\n{INDENTED}"


def test_other_parts_of_the_assertion_stay():
    def check():
        findings, size = tree(LOST).findings, len("four")
        assert len(findings) == 0, f"of {size}"

    assert explained(check) == (f"of 4\nassert 1 == 0\n +  where 1 = len({SHORT})\n{INDENTED}")

    def check_both():
        subject = tree(LOST)
        assert not (subject.findings and subject.backend.upper())

    lines = explained(check_both).splitlines()
    assert lines[0] == f"assert not ({SHORT} and 'GLOO')"
    assert "'GLOO' = <built-in method upper of str object at 0x" in lines[1]
    assert lines[-5:] == INDENTED.splitlines()
    assert not [line for line in lines if f"{SHORT} =" in line]


@pytest.mark.parametrize("args", [(), (1,), ("a", "b")])
def test_another_error_is_left_as_it_is(args):
    def check():
        findings = tree(LOST).findings
        assert findings
        raise AssertionError(*args)

    with pytest.raises(AssertionError) as caught:
        check()
    explain_findings(caught.value)
    assert caught.value.args == args

    def unrelated():
        findings = tree(LOST).findings
        assert findings
        assert 1 == 2, "numbers"  # noqa: PLR0133  # to fail

    assert explained(unrelated) == "numbers\nassert 1 == 2"
