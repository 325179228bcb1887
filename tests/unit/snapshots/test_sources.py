"""Whether a module's source can define a test: never no where a branch can."""

import pytest

from pytest_fsdp_comm.snapshots.sources import read_module

BASE = "class Base:\n    def test_x(self): ...\n"
PARAMETRIZED = "@pytest.mark.parametrize({})\ndef test_x(a): ...\n"


@pytest.fixture
def module(tmp_path):
    def read(source, conftest=None):
        (tmp_path / "tests").mkdir(exist_ok=True)
        path = tmp_path / "tests/test_a.py"
        if source is not None:
            path.write_bytes(source if isinstance(source, bytes) else source.encode())
        if conftest is not None:
            (tmp_path / "conftest.py").write_text(conftest)
        return read_module(path, tmp_path)

    return read


@pytest.mark.parametrize(
    ("test", "source"),
    [
        ("test_x", "def test_x(): ..."),
        ("test_x", "if GPU:\n    async def test_x(): ..."),
        ("test_x", "try:\n    import cuda\nexcept ImportError: pass\nelse:\n    def test_x(): ..."),
        ("test_x", "if GPU:\n    from cases import test_x"),
        ("test_x", "from cases import case as test_x"),
        ("test_x", "test_x = make() if GPU else None"),
        ("test_x", "for test_x in (): pass"),
        ("test_%C3%A9", "if GPU:\n    def test_é(): ..."),
        ("TestA.test_x", "class TestA:\n    if GPU:\n        def test_x(self): ..."),
        ("TestA.test_x", f"{BASE}\nif GPU:\n    class TestA(Base): ..."),
        ("TestA.test_x", f"{BASE}\nclass Two(Base): ...\nclass TestA(Two): ..."),
        ("TestA.test_x", "class TestA: ...\nif GPU:\n    TestA.test_x = lambda self: 0"),
        ("TestA.TestB.test_x", "class TestA:\n    class TestB:\n        def test_x(self): ..."),
    ],
)
def test_what_a_branch_defines_by_name_is_there(module, test, source):
    assert module(source).find(test) == ""


@pytest.mark.parametrize(
    ("test", "source", "doubt"),
    [
        ("test_x", "if GPU:\n    from cases import *", "line 2 (from cases import *)"),
        ("test_x", "exec(text)", "line 1 (exec(text))"),
        ("test_x", "def make():\n    globals()['test_' + 'x'] = 0\nmake()", "line 2 (glob"),
        ("test_x", "def test_all():\n    globals()['test_x'] = 0\ntest_all()", "line 2 (glob"),
        ("test_x", "setattr(sys.modules[__name__], name, f)", "line 1 (setattr("),
        ("test_x", "setattr(module, 'test_x', f)", "line 1 (setattr("),
        ("test_x", "sys.modules[__name__].__dict__[name] = f", "line 1 (sys.modules"),
        ("test_x", "inspect.currentframe().f_globals[name] = f", "line 1 (inspect."),
        ("test_x", "from bdd import scenarios\nscenarios('features')", "line 2 (scenarios("),
        ("test_x", "import cases\ncases.define()", "line 2 (cases.define())"),
        ("test_x", "add_tests(__name__)", "line 1 (add_tests(__name__))"),
        ("test_x_0", "from p import expand\n@expand(2)\ndef test_x(): ...", "line 2 (@expand(2))"),
        ("TestA.test_x", "class TestA(Base): ...", "line 1 (base class of TestA: Base)"),
        ("TestA.test_x", "class TestA(Base if GPU else object): ...", "line 1 (base class of"),
        ("TestA.test_x", "class TestA(metaclass=Meta): ...", "line 1 (base class of TestA: Meta)"),
        ("TestA.test_x", "class B(common.Base): ...\nclass TestA(B): ...", "line 1 (base"),
        ("TestA.test_x", "from cases import TestA", "line 1 (TestA)"),
        ("TestA.test_x", "if GPU:\n    TestA = type('TestA', (Base,), {})", "line 2 (type("),
        ("TestA.test_x", "from ddt import ddt\n@ddt\nclass TestA: ...", "line 2 (@ddt)"),
        ("TestA.test_x", "class TestA: ...\ninstantiate(TestA)", "line 2 (instantiate(TestA))"),
        ("TestA.test_x", "class TestA:\n    for n in 'x':\n        locals()[n] = f", "line 3 (loc"),
        ("test_x", "def test_x(]", "cannot be read as Python"),
        ("test_x", None, "cannot be read as Python"),
        ("test_x", b"# coding: nothing\n", "cannot be read as Python"),
        ("test_x", "a = " + "+".join(["b"] * 5000), "cannot be read as Python"),
        ("test_xx~0123456789abcdef", "", "its name is too long to be read back"),
    ],
)  # fmt: skip
def test_what_may_define_any_name_leaves_a_doubt(module, test, source, doubt):
    found = module(source).find(test)
    assert found is not None
    assert found.removeprefix("tests/test_a.py").lstrip(", ").startswith(doubt)


@pytest.mark.parametrize(
    ("test", "source"),
    [
        ("test_x", ""),
        ("test_x", "def _x(): ..."),
        ("test_x", "class TestA:\n    def test_x(self): ..."),
        ("TestA.test_x", "def test_x(): ...\nclass TestA:\n    def _x(self): ..."),
        ("TestA.test_x", "class TestB:\n    def test_x(self): ...\nclass TestA: ..."),
        ("TestA.test_x", "class Base: ...\nclass TestA(Base, unittest.TestCase): ..."),
        ("test_x", "def test_y():\n    setattr(model, name, 1); exec(code); vars(model)"),
        ("test_x", "@pytest.fixture\ndef model():\n    return vars(torch)[name]()"),
        ("test_x", "from p import gpu\n@gpu\ndef test_y(): ..."),
        ("test_x", "gpu = pytest.mark.skipif(not GPU)\n@gpu\n@torch.no_grad()\ndef test_xs(): ..."),
        ("test_x", "setattr(torch, 'flag', 1)"),
        ("test_x", "log = logging.getLogger(__name__)\nif __name__ == '__main__':\n    main()"),
        (
            "test_x",
            "import os.path\nos.makedirs('x')\ntorch.manual_seed(0)\ndef f(): ...\nf()",
        ),
        ("TestA.test_x", "class TestA:\n    def test_y(self):\n        super(TestA, self).run()"),
    ],
)
def test_what_no_branch_defines_is_gone(module, test, source):
    source = f"import pytest, torch, unittest\n{source}"
    assert module(source, conftest="from everywhere import *\n").find(test) is None


def test_a_hook_of_a_conftest_may_make_items_of_any_name(module):
    doubt = module("", conftest="\ndef pytest_pycollect_makeitem(): ...").find("test_x")
    assert doubt == "conftest.py, line 2 (pytest_pycollect_makeitem)"


@pytest.mark.parametrize(
    "source",
    [
        PARAMETRIZED.format("'a', ['small', 'large']"),
        PARAMETRIZED.format("argnames='a', argvalues=range(4), ids=str"),
        PARAMETRIZED.format("['a', 'b'], [(1, -2), pytest.param(3, 2**4, id='x', marks=GPU)]"),
        PARAMETRIZED.format("'a', [torch.float32, helper], ids=['x', 'y']"),
        "CASES = ['x']\n" + PARAMETRIZED.format("'a', CASES"),
        "sizes = pytest.mark.parametrize('a', [1])\n@sizes\ndef test_x(a): ...",
        "pytestmark = [pytest.mark.parametrize('a', [1])]\ndef test_x(a): ...",
        "@pytest.fixture(params=[1, 2])\ndef a(request): ...\ndef test_x(a): ...",
        "@pytest.fixture(params=[1], name='a')\ndef _(request): ...\ndef test_x(a): ...",
        PARAMETRIZED.format("'a', [1]") + "@pytest.mark.parametrize('z', Z)\ndef test_z(z): ...",
        PARAMETRIZED.format("'a', [1]") + "@pytest.fixture(params=Z)\ndef z(request): ...",
    ],
)
def test_parameters_of_constants_are_known(module, source):
    found = module(f"def helper(): ...\n{source}")
    assert found.find_parameters("test_x", used={"a", "b"}, given={"a"}) is None


@pytest.mark.parametrize(
    ("source", "doubt"),
    [
        (PARAMETRIZED.format("'a', [1, 2] if GPU else [1]"), "line 1 (pytest.mark.parametrize("),
        (PARAMETRIZED.format("'a', [*MORE]"), "line 1 (pytest"),
        (PARAMETRIZED.format("'a', cases()"), "line 1 (pytest"),
        (PARAMETRIZED.format("*given"), "line 1 (pytest"),
        (PARAMETRIZED.format("'a', [1], **given"), "line 1 (pytest"),
        (PARAMETRIZED.format("'a', [config.SIZE]"), "line 1 (pytest"),
        (PARAMETRIZED.format("'a', [1], ids=[DEVICE]"), "line 1 (pytest"),
        (PARAMETRIZED.format("'a', [1], ids=lambda a: DEVICE"), "line 1 (pytest"),
        ("A = [1]\nA.append(2)\n" + PARAMETRIZED.format("'a', A"), "line 3 (pytest"),
        ("A = [1]\nmore(A)\n" + PARAMETRIZED.format("'a', A"), "line 3 (pytest"),
        ("A = [1]\nA += [2]\n" + PARAMETRIZED.format("'a', A"), "line 3 (pytest"),
        ("A = A\n" + PARAMETRIZED.format("'a', A"), "line 2 (pytest"),
        ("from cases import A\n" + PARAMETRIZED.format("'a', A"), "line 2 (pytest"),
        ("from cases import sizes\n@sizes\ndef test_x(a): ...", "line 2 (sizes)"),
        ("pytestmark = sizes\ndef test_x(a): ...", "line 1 (sizes)"),
        (
            "if GPU:\n    pytestmark = pytest.mark.parametrize('a', [1, 2])\nelse:\n"
            "    pytestmark = pytest.mark.parametrize('a', [1])\ndef test_x(a): ...",
            "line 2 (pytestmark)",
        ),
        (
            "if GPU:\n    sizes = pytest.mark.parametrize('a', [1, 2])\nelse:\n"
            "    sizes = pytest.mark.parametrize('a', [1])\n@sizes\ndef test_x(a): ...",
            "line 5 (sizes)",
        ),
        ("pytestmark = []\npytestmark += sizes\ndef test_x(a): ...", "line 2 (pytestmark)"),
        ("@pytest.fixture(params=Z)\ndef a(request): ...\ndef test_x(a): ...", "line 1 (pytest.f"),
        ("def pytest_generate_tests(metafunc): ...\ndef test_x(a): ...", "line 1 (pytest_gen"),
        ("from cases import *\ndef test_x(a): ...", "line 1 (from cases import *)"),
        ("def test_x(a): ...", "no list in the source gives a"),
        (2 * PARAMETRIZED.format("'a', [1]"), "does not define it, or not once"),
        ("from cases import test_x", "does not define it, or not once"),
    ],
)
def test_other_parameters_leave_a_doubt(module, source, doubt):
    found = module(source).find_parameters("test_x", used={"a"}, given={"a"})
    assert found is not None
    assert found.removeprefix("tests/test_a.py").lstrip(", ").startswith(doubt)


@pytest.mark.parametrize(
    "conftest",
    [
        "@pytest.fixture(params=['cpu', 'cuda'] if GPU else None)\ndef a(request): ...",
        "if GPU:\n    @pytest.fixture(params=[1])\n    def a(request): ...\n"
        "else:\n    @pytest.fixture\n    def a(): ...",
        "def pytest_generate_tests(metafunc): ...",
    ],
)
def test_a_conftest_may_add_parameters_in_another_branch(module, conftest):
    found = module("def test_x(a): ...", conftest=conftest)
    assert found.find_parameters("test_x", used={"a"}, given=set()).startswith("conftest.py, line ")
    found = module("def test_x(a): ...", conftest="@pytest.fixture\ndef a(): ...")
    assert found.find_parameters("test_x", used={"a"}, given=set()) is None
