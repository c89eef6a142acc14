"""Every new import on the page of old and new names works."""

import re
from importlib import import_module

import pytest

from tests.docs.markdown import ROOT

PAGE = (ROOT / "docs/old-and-new-names.md").read_text(encoding="utf-8")
IMPORTS = re.findall(r"`from (loopscope[\w.]*) import ([^`]+)`", PAGE)


@pytest.mark.parametrize(
    ("module", "names"), IMPORTS, ids=[f"{module}-{index}" for index, (module, _) in enumerate(IMPORTS)]
)
def test_a_new_import_works(module: str, names: str) -> None:
    missing = [name for name in names.split(", ") if not hasattr(import_module(module), name)]
    assert not missing


def test_old_names_cannot_be_imported() -> None:
    assert len(IMPORTS) > 40
    for name in re.findall(r"^\| `((?:framework|experiments)[\w.]*)` \|", PAGE, re.MULTILINE):
        with pytest.raises(ImportError):
            import_module(name)
