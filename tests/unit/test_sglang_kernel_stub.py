"""The CPU stub of SGLang's kernels has just the names that the installed SGLang must be able to import."""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

STUB = Path(__file__).parents[2] / "cpu_development/sglang_kernel_stub/sgl_kernel/__init__.py"


@pytest.fixture(scope="module")
def stub() -> ModuleType:
    # By path: on a GPU machine `import sgl_kernel` gives the real package.
    spec = importlib.util.spec_from_file_location("sgl_kernel_stub_under_test", STUB)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def imported_with_module(node: ast.AST) -> Iterator[str]:
    """CPU kernels that the import of a module asks for, so outside of functions, and by name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom) and child.module == "sgl_kernel":
            yield from (alias.name for alias in child.names if alias.name.endswith("_cpu"))
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imported_with_module(child)


def test_names_are_those_that_sglang_imports(stub: ModuleType) -> None:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    wanted: set[str] = set()
    for folder in ("srt", "kernels"):
        for file in (package / folder).rglob("*.py"):
            if "sgl_kernel" in (source := file.read_text()):
                wanted.update(imported_with_module(ast.parse(source)))
    assert wanted == stub.SPECULATIVE_OPS


def test_an_op_imports_and_refuses_to_run(stub: ModuleType) -> None:
    for name in stub.SPECULATIVE_OPS:
        op = getattr(stub, name)
        with pytest.raises(NotImplementedError, match=rf"sgl_kernel\.{name} .* speculative decoding"):
            op(1, stride=2)


# SGLang takes its fallback on an ImportError, and `hasattr` must say no.
@pytest.mark.parametrize("name", ["silu_and_mul", "rmsnorm", "flash_mla_decode", "decode_attention_cpu"])
def test_any_other_name_is_missing(stub: ModuleType, name: str) -> None:
    assert not hasattr(stub, name)
    with pytest.raises(AttributeError, match=f"no '{name}'.*stub"):
        getattr(stub, name)
