"""Draw a tree on the terminal, as a page and as JSON."""

import re
from dataclasses import replace

import pytest
from page_checks import check_page
from report_values import DP, parameter, stack, unit

from pytest_fsdp_comm.comm.mesh import MeshAxis
from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.fsdp_tree import TreeFactory
from pytest_fsdp_comm.reports.html.pages import render_tree_page
from pytest_fsdp_comm.reports.trees import policy_words, render_tree, tree_rows
from pytest_fsdp_comm.tree.finding import Finding
from pytest_fsdp_comm.tree.model import ModuleNode, Precision, dump_tree, load_tree

FINDING = Finding(
    code="partly-wrapped",
    level="warning",
    fqns=("layers.1", "layers.2"),
    reason="two are <not>",
    cure="wrap them",
    nbytes=3000,
)


def test_alike_blocks_share_a_row():
    lines = render_tree(stack(odd=7)).splitlines()
    assert [re.sub(" {2,}", "  ", line.lstrip()) for line in lines] == [
        "4 ranks, dp=4; 33 units; 33 parameters, 128.0 KiB in all, 32.0 KiB on rank 0",
        "",
        "module  policy or placement  gathered  kept",
        (
            "(root) [Model]  FULLY SHARDED dp=4, stays unsharded after forward, bfloat16, root  "
            "2.0 KiB  1.0 KiB"
        ),
        ". scale [2] float32  full copy on each rank",
        "layers [ModuleList]",
        "{0..6} x7 [Block]  FULLY SHARDED dp=4, reshards after forward, bfloat16  2.0 KiB  1.0 KiB",
        "up [Linear] weight [16, 64] float32  Shard(0)@dp",
        "7 [Block]  FULLY SHARDED dp=4, stays unsharded after forward, bfloat16  2.0 KiB  1.0 KiB",
        "up [Linear] weight [16, 64] float32  Shard(0)@dp",
        (
            "{8..31} x24 [Block]  FULLY SHARDED dp=4, reshards after forward, bfloat16  "
            "2.0 KiB  1.0 KiB"
        ),
        "up [Linear] weight [16, 64] float32  Shard(0)@dp",
    ]
    indents = [len(line) - len(line.lstrip()) for line in lines[3:]]
    assert indents == [0, 2, 2, 4, 6, 4, 6, 4, 6]
    marks = {line.index("FULLY SHARDED") for line in lines if "FULLY SHARDED" in line}
    assert marks == {lines[2].index("policy or placement")}
    assert len({len(line) for line in lines if "FULLY SHARDED" in line}) == 1


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (
            {"replicate_axis": MeshAxis(name="replica", size=2), "offload": True},
            "dp=4, replicated replica=2, reshards after forward, bfloat16, offloaded to host",
        ),
        (
            {"reshard_after_forward": 2, "gradient_divide_factor": 8.0}
            | {"force_sum_reduction": True},
            "dp=4, reshards to 2 ranks after forward, bfloat16, gradients divided by 8, "
            "gradients summed, not averaged",
        ),
        (
            {"precision": Precision(reduce_dtype="float32"), "is_root": True},
            "dp=4, reshards after forward, float32, root",
        ),
        (
            {"kind": "ddp", "shard_axis": None, "replicate_axis": DP, "precision": Precision()}
            | {"reshard_after_forward": None},
            "dp=4",
        ),
    ],
)
def test_each_policy_is_put_in_words(policy, words):
    assert policy_words(unit(1, (), **policy)) == words


def test_a_replicated_unit_is_marked_as_one():
    tree = stack(blocks=1)
    copies = {"shard_axis": None, "replicate_axis": DP, "nbytes_gathered": 0}
    tree = replace(tree, units=(replace(tree.units[0], kind="ddp", **copies), tree.units[1]))
    assert "(root) [Model]  REPLICATED dp=4" in re.sub(" {2,}", "  ", render_tree(tree))
    assert "<b>REPLICATED</b> dp=4" in render_tree_page(tree)


def test_every_module_is_in_exactly_one_row():
    tree = stack(odd=3)
    rows = list(tree_rows(tree))
    assert sum(row.count for row in rows if row.class_name == "Block") == 32


def test_pytest_shows_a_tree_in_a_few_words():
    assert repr(stack(blocks=2)) == "<ShardTree of Model: 3 units, 3 parameters>"


def test_a_finding_is_below_the_tree():
    assert render_tree(replace(stack(), findings=(FINDING,))).endswith(
        "\nwarning partly-wrapped (2.9 KiB): layers.{1..2}\n  two are <not>\n  fix: wrap them"
    )


def test_the_page_is_whole_and_has_a_bar_for_each_unit():
    tree = replace(stack(odd=7), findings=(FINDING,))
    tree = replace(tree, units=(replace(tree.units[0], nbytes_gathered=8192), *tree.units[1:]))
    page = render_tree_page(tree)
    check_page(page)
    bars = re.findall(r'data-gathered="([^"]*)" data-kept="([^"]*)"', page)
    assert bars == [("8192", "1024"), *[("2048", "1024")] * 3]
    assert "two are &lt;not&gt;" in page
    assert "warning: partly-wrapped" in page
    assert '<code>{0..6}</code> <span class="dim">\N{MULTIPLICATION SIGN}7</span>' in page


def test_user_names_are_escaped_on_the_page():
    markup = '<b class="x">&\''
    tree = stack(blocks=1)
    named = ModuleNode(name=markup, parent=0, depth=1, class_name=markup)
    alias = ModuleNode(name="again", parent=0, depth=1, class_name="Block", alias_of=4)
    finding = replace(FINDING, fqns=(markup,), reason=markup, cure=markup)
    tree = replace(tree, modules=(*tree.modules, named, alias), findings=(finding,))
    page = render_tree_page(tree)
    check_page(page)
    assert "<b class" not in page
    assert page.count("&lt;b class") == 3
    assert page.count("&lt;b\\x20class") == 3


def test_draw_very_deep_tree_is_flat_and_truncated():
    modules = [ModuleNode(name="", parent=None, depth=0, class_name="Model")]
    modules += [
        ModuleNode(name="c", parent=depth - 1, depth=depth, class_name="C")
        for depth in range(1, 5000)
    ]
    tree = replace(stack(), modules=tuple(modules), parameters=(), units=())
    assert max(len(line) for line in render_tree(tree).splitlines()) < 130
    page = render_tree_page(tree)
    check_page(page)
    assert page.count('<th role="rowheader"') == 2500
    assert "2500 more modules are omitted" in page
    assert 'class="d12"' in page
    assert 'class="d13"' not in page


def test_json_round_trips():
    fsdp1 = unit(0, (0,), kind="fsdp1", prefetch="FORWARD", forward_prefetch=(1,))
    tied = parameter(0, "tied", tied=((1, "x"),), shape=(), unit=0)
    tree = replace(
        stack(blocks=2), units=(fsdp1, unit(2, (1,))), findings=(FINDING,), notes=("a note",)
    )
    tree = replace(tree, parameters=(tied, *tree.parameters[1:]))
    assert load_tree(dump_tree(tree)) == tree


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "expected a tree, but it is not valid JSON: "),
        ("[1]", "expected a tree of JSON version 1, got [1]; save it again with this version"),
        (
            '{"kind": "tree", "version": 2}',
            "expected a tree of JSON version 1, got ('tree', 2); save it again with this version",
        ),
        ('{"kind": "tree", "version": 1, "value": {}}', "tree lacks the field 'backend'"),
    ],
)
def test_json_that_is_no_tree_is_refused(text, problem):
    with pytest.raises(FsdpCommError, match="^" + re.escape(problem)):
        load_tree(text)


def test_the_suffix_decides_how_a_tree_is_saved(tmp_path):
    tree = stack()
    TreeFactory().save(tree, tmp_path / "tree.html")
    TreeFactory().save(tree, tmp_path / "tree.json")
    assert (tmp_path / "tree.html").read_text(encoding="utf-8") == render_tree_page(tree)
    assert load_tree((tmp_path / "tree.json").read_text(encoding="utf-8")) == tree
    with pytest.raises(FsdpCommError) as caught:
        TreeFactory().save(tree, "tree.pdf")
    assert str(caught.value) == (
        "fsdp_tree.save writes .html and .json files, got 'tree.pdf'; use one of these extensions"
    )


@pytest.mark.parametrize(
    ("call", "usage"),
    [
        (lambda factory, thing: factory.show(thing), "fsdp_tree.show(fsdp_tree(model))"),
        (
            lambda factory, thing: factory.save(thing, "tree.json"),
            "fsdp_tree.save(fsdp_tree(model), path)",
        ),
    ],
    ids=["show", "save"],
)
@pytest.mark.parametrize("thing", [object(), None, dump_tree(stack())])
def test_what_is_no_tree_is_refused(call, usage, thing, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FsdpCommError) as caught:
        call(TreeFactory(), thing)
    name = usage.partition("(")[0]
    assert str(caught.value) == (
        f"{name} expects a tree returned by fsdp_tree(model), got {type(thing).__name__}; "
        f"write {usage}"
    )
    assert not list(tmp_path.iterdir())
