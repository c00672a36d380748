"""Loads a command of `scripts/` as a module; its name has no ending, so `import` does not find it."""

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


def load_command(name: str) -> ModuleType:
    """The command as a new module, which is known as `scripts_NAME`."""
    loader = SourceFileLoader(f"scripts_{name}", str(SCRIPTS / name))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[loader.name] = module  # where a dataclass looks its own annotations up
    loader.exec_module(module)
    return module
