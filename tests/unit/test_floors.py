"""The floors of the house: which room may import which. The tables below are the rule; the whole tree must obey it.

Every import counts, also one inside a function or under TYPE_CHECKING. Modules named in strings (`python -m`, an import
name given to an engine) do not: they are loaded in another process.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from megarl.config.fields import Section

ROOT = Path(__file__).parents[2]

FLOORS = {
    "types": 0,
    "config": 0,
    "algorithms": 1,
    "data": 1,
    "rewards": 1,
    "runtime": 1,
    "observe": 1,
    "weights": 1,
    "model_engine": 2,
    "rollout_engine": 2,
    "transfer_queue": 2,
    "checkpoint_engine": 3,
    "simulator": 3,
    "layout": 4,
    "trainer": 4,
    "launch": 5,
    "tools": 5,
}
BESIDE = {("config", "types")}
"""(importer, imported) on one floor, the exceptions to never importing from beside."""

OUTSIDE_MEGARL = {"launch", "tools"}
"""Rooms that lie beside the package; all others are `megarl.<room>`."""

NO_DOOR = {"types"}
"""Rooms that are one module, so that there is nothing to go around."""

SIDE_DOORS = {"megarl.rollout_engine.scheduler", "megarl.transfer_queue.admission"}
"""Pure parts of rooms that have a door of their own."""

ENGINES = {"megatron": "megarl/model_engine/", "sglang": "megarl/rollout_engine/server.py"}
"""Where alone each of the two may be imported: a folder or a file."""

BASELINES = {"tools/bench/mbridge_convert.py"}
"""Benchmarks that run another library, which drives Megatron itself; they are nobody's rooms."""

LIGHT = {"types", "config", "simulator", "layout"}
"""Rooms that must load on a login node, so without torch."""

PURE = {"algorithms": {"torch", "jaxtyping"}}
"""Rooms that import the standard library, floor 0 and these packages, and nothing else."""

Doors = Mapping[str, set[str]]
"""The names that each room offers to the others."""


@dataclass(frozen=True)
class Import:
    """`import module` where `name` is None, otherwise `from module import name`."""

    line: int
    module: str
    name: str | None


def imports(path: str, source: str) -> Iterator[Import]:
    """Every import of a file, relative ones made absolute."""
    package = path.removesuffix(".py").split("/")[:-1]
    for node in ast.walk(ast.parse(source, path)):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, node.module] if node.module else base)
            for alias in node.names:
                # `from megarl import config` imports the room, not a name of the package.
                if module == "megarl":
                    yield Import(node.lineno, f"megarl.{alias.name}", None)
                else:
                    yield Import(node.lineno, module, alias.name)


def room_of(dotted: str) -> str | None:
    """The room that a module belongs to: `megarl.config.load` to config; None for modules that are not ours."""
    parts = dotted.split(".")
    if parts[0] in OUTSIDE_MEGARL:
        return parts[0]
    return parts[1] if parts[0] == "megarl" and len(parts) > 1 else None


def violations(path: str, source: str, doors: Doors | None = None) -> list[str]:
    """What the imports of the file at `path` (from the root) break, each as "file:line: what: rule"."""
    if path in BASELINES:
        return []
    own = room_of(path.removesuffix("/__init__.py").removesuffix(".py").replace("/", "."))
    found = []
    for item in imports(path, source):
        other = room_of(item.module)
        broken = [engine_rule(path, item), package_rule(own, item)]
        if other is not None and other != own:
            broken += [floor_rule(own, other), door_rule(other, item, doors or {})]
        found += [f"{path}:{item.line}: {text}" for text in broken if text is not None]
    return found


def named(room: str) -> str:
    return f"{room} (floor {FLOORS[room]})"


def floor_rule(own: str | None, other: str) -> str | None:
    unknown = [room for room in (own, other) if room is not None and room not in FLOORS]
    if unknown:
        return f"room {unknown[0]} stands on no floor: give it one in this test and in the design"
    if own is None:
        return f"the package itself imports {named(other)}: megarl/__init__.py imports no room"
    if FLOORS[other] < FLOORS[own] or (own, other) in BESIDE:
        return None
    if FLOORS[other] == FLOORS[own]:
        return f"{named(own)} imports {named(other)}: a room imports nothing from beside it"
    return f"{named(own)} imports {named(other)}: a room imports only from lower floors"


def door_rule(other: str, item: Import, doors: Doors) -> str | None:
    if other in OUTSIDE_MEGARL | NO_DOOR:
        return None
    if item.module in SIDE_DOORS:
        return None
    if item.module != f"megarl.{other}":
        return f"imports {item.module}: others import a room from its door, megarl.{other}"
    if item.name is not None and other in doors and item.name not in doors[other]:
        return f"imports {item.name} from megarl.{other}: not a name in that room's __all__"
    return None


def engine_rule(path: str, item: Import) -> str | None:
    package = item.module.split(".")[0]
    if package not in ENGINES or path.startswith(ENGINES[package]):
        return None
    return f"imports {package}: only {ENGINES[package]} may"


def package_rule(own: str | None, item: Import) -> str | None:
    package = item.module.split(".")[0]
    if own in LIGHT and package == "torch":
        return f"{own} imports torch: it must load without, on a login node"
    if own in PURE and package not in PURE[own] | sys.stdlib_module_names | {"megarl"}:
        return f"{own} imports {package}: it may import {', '.join(sorted(PURE[own]))} and the standard library"
    return None


def source_files() -> list[Path]:
    files = [file for folder in ("megarl", "launch", "tools") for file in (ROOT / folder).rglob("*.py")]
    return sorted(files)


def read_doors() -> Doors:
    """`__all__` of each room, read without importing it."""
    doors = {}
    for file in ROOT.glob("megarl/*/__init__.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                doors[file.parent.name] = set(ast.literal_eval(node.value))
    return doors


def test_the_whole_tree_obeys() -> None:
    doors = read_doors()
    found = [
        line
        for file in source_files()
        for line in violations(file.relative_to(ROOT).as_posix(), file.read_text(), doors)
    ]
    assert not found, "\n" + "\n".join(found)


def test_every_room_has_a_floor() -> None:
    rooms = {room_of(".".join(file.relative_to(ROOT).with_suffix("").parts)) for file in source_files()}
    assert rooms - {"__init__"} <= set(FLOORS)


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        # Upward, however the import is written.
        ("megarl/data/a.py", "from megarl.trainer import run", "data (floor 1) imports trainer (floor 4)"),
        ("megarl/data/a.py", "import megarl.trainer", "only from lower floors"),
        ("megarl/data/a.py", "from megarl import trainer", "only from lower floors"),
        ("megarl/data/a.py", "from ..trainer import run", "only from lower floors"),
        ("megarl/data/deep/a.py", "from ...trainer import run", "only from lower floors"),
        ("megarl/data/__init__.py", "from ..trainer import run", "only from lower floors"),
        ("megarl/data/a.py", "from .. import trainer", "only from lower floors"),
        ("megarl/data/a.py", "def f():\n    from megarl.trainer import run", "megarl/data/a.py:2: "),
        ("megarl/data/a.py", "if TYPE_CHECKING:\n    import megarl.trainer", "megarl/data/a.py:2: "),
        ("megarl/trainer/a.py", "import launch.train", "trainer (floor 4) imports launch (floor 5)"),
        ("megarl/rewards/a.py", "from megarl.rollout_engine import Client", "only from lower floors"),
        ("megarl/types.py", "from megarl.data import load", "only from lower floors"),
        ("megarl/__init__.py", "from megarl.config import load_recipe", "imports no room"),
        # Beside.
        ("megarl/data/a.py", "from megarl.rewards import score", "nothing from beside it"),
        ("megarl/model_engine/a.py", "from megarl.rollout_engine import Client", "nothing from beside it"),
        ("megarl/types.py", "import megarl.config", "nothing from beside it"),
        ("tools/a.py", "from launch import train", "nothing from beside it"),
        # A room that is not in the table.
        ("megarl/attic/a.py", "from megarl.types import Prompt", "room attic stands on no floor"),
        ("megarl/trainer/a.py", "from megarl.attic import junk", "room attic stands on no floor"),
        # The two engines.
        ("megarl/rollout_engine/a.py", "import megatron.core", "imports megatron: only megarl/model_engine/ may"),
        ("megarl/model_engine/a.py", "from sglang.srt import utils", "only megarl/rollout_engine/server.py may"),
        ("megarl/rollout_engine/client.py", "import sglang", "imports sglang"),
        ("megarl/checkpoint_engine/a.py", "import sglang", "imports sglang"),
        ("megarl/checkpoint_engine/a.py", "import megatron.core", "imports megatron"),
        ("megarl/trainer/a.py", "from megatron.core import parallel_state", "imports megatron"),
        ("megarl/rewards/a.py", "import sglang", "imports sglang"),
        ("tools/a.py", "import megatron", "imports megatron"),
        # Rooms that are light, or pure.
        ("megarl/types.py", "import torch", "types imports torch"),
        ("megarl/config/a.py", "def f():\n    from torch import nn", "config imports torch"),
        ("megarl/algorithms/a.py", "import numpy", "algorithms imports numpy"),
        ("megarl/algorithms/a.py", "from transformers import AutoModel", "algorithms imports transformers"),
        # Around the door.
        ("megarl/trainer/a.py", "from megarl.config.load import load_recipe", "from its door, megarl.config"),
        ("megarl/trainer/a.py", "import megarl.config.load", "from its door, megarl.config"),
        ("launch/train.py", "from megarl.config.load import load_recipe", "from its door, megarl.config"),
        ("megarl/trainer/a.py", "from megarl.config import secret", "not a name in that room's __all__"),
        ("megarl/trainer/a.py", "from megarl.config import load", "not a name in that room's __all__"),
    ],
)
def test_a_broken_rule_is_found(path: str, source: str, expected: str) -> None:
    found = violations(path, source, {"config": {"load_recipe"}})
    assert len(found) == 1
    assert found[0].startswith(f"{path}:")
    assert expected in found[0]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("megarl/config/a.py", "from megarl.types import Prompt"),
        ("megarl/config/a.py", "from megarl.config.errors import RecipeError\nfrom . import errors\nimport pydantic"),
        ("megarl/config/__init__.py", "from .errors import RecipeError"),
        ("megarl/algorithms/a.py", "import math, torch\nfrom jaxtyping import Float\nfrom megarl.config import Grpo"),
        ("megarl/model_engine/deep/a.py", "import megatron.core\nfrom megarl.runtime import RankInfo"),
        ("megarl/rollout_engine/server.py", "def f():\n    from sglang.srt.server_args import ServerArgs"),
        ("megarl/checkpoint_engine/a.py", "from megarl.model_engine import tables\nimport torch"),
        ("megarl/simulator/a.py", "from megarl.rollout_engine.scheduler import Context"),
        ("launch/train.py", "from megarl import trainer\nfrom megarl.trainer import run"),
        ("tools/a.py", "import tools.bench.clock\nSERVER = 'megarl.rollout_engine.server'"),
    ],
)
def test_an_allowed_import_passes(path: str, source: str) -> None:
    assert violations(path, source, {"config": {"Grpo"}}) == []


def test_two_rules_broken_at_once_are_both_told() -> None:
    assert len(violations("megarl/rewards/a.py", "import sglang\nfrom megarl.trainer.rl import run")) == 3


def test_light_rooms_load_nothing_heavy() -> None:
    heavy = ["torch", "numpy", "transformers", "megatron", "sglang"]
    program = f"import sys, megarl.types, megarl.config; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "[]"


def recipe_sections(base: type[Section] = Section) -> list[type[Section]]:
    """All there are, in whichever file."""
    return [one for child in base.__subclasses__() for one in (child, *recipe_sections(child))]


@pytest.mark.parametrize("section", recipe_sections(), ids=lambda section: section.__name__)
def test_every_recipe_field_is_described(section: type[Section]) -> None:
    bare = [name for name, field in section.model_fields.items() if not (field.description or "").strip()]
    assert not bare, f"{section.__name__} has fields without a docstring: {', '.join(bare)}"
