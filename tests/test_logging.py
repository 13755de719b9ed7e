"""The library logs by one logger per module, prints nothing itself, and configures no logging."""

import ast
import re
import sys
from pathlib import Path

import cgx_jax
from processes import finish, start

ROOT = Path(cgx_jax.__file__).parent
TROUBLESHOOTING = ROOT.parent / "docs" / "troubleshooting.md"
# Commands may print.
COMMANDS = ("__main__.py", "commands", "host/console.py")

IMPORTED = """
import logging, sys
import jax
before = set(sys.modules)
import cgx_jax, cgx_jax.__main__
print(sorted({m.partition(".")[0] for m in sys.modules.keys() - before} & {"rich"}))
print(logging.getLogger().handlers)
ours = [x for name, x in logging.root.manager.loggerDict.items() if name.startswith("cgx_jax")]
ours = [x for x in ours if isinstance(x, logging.Logger)]
print(len(ours) > 0, {(len(x.handlers), x.level, x.propagate) for x in ours})
logging.getLogger("cgx_jax.tuning.sweep").warning("a warning")
logging.getLogger("cgx_jax.tuning.tuner").info("information")
"""


def calls(name):
    """Yields (file, call) for every call of `name` in the package."""
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = getattr(node.func, "id", getattr(node.func, "attr", None))
                if called == name:
                    yield path.relative_to(ROOT), node


def test_importing_imports_no_rich_and_configures_no_logging():
    code, out, error = finish(start([sys.executable, "-W", "ignore", "-c", IMPORTED]))
    assert code == 0, error
    assert out.splitlines() == ["[]", "[]", "True {(0, 0, True)}"]
    assert error == "a warning\n"  # Python shows warnings and errors by itself


def test_only_commands_print():
    files = {path for path, _ in calls("print")}
    assert [f for f in files if f.parts[0] not in COMMANDS and str(f) not in COMMANDS] == []


def test_a_logger_has_the_name_of_its_module():
    loggers = list(calls("getLogger"))
    assert loggers
    for path, call in loggers:
        assert [ast.unparse(argument) for argument in call.args] == ["__name__"], path


def test_every_logger_is_documented():
    section = TROUBLESHOOTING.read_text().partition("## Logging")[2]
    documented = set(re.findall(r"^\| `(cgx_jax[.\w]+)` \|", section, re.MULTILINE))
    files = [path.with_suffix("").parts for path, _ in calls("getLogger")]
    assert documented == {".".join(("cgx_jax", *parts)) for parts in files}
