"""Optional packages, which only parts of loopscope need."""

import pytest
from loopscope.errors import UsageError, require_package


def test_installed_package_is_accepted():
    require_package("json", "Sink 'some'", "some")


def test_folder_with_package_name_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a_folder_of_runs").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=r"'some' needs the package a_folder_of_runs.*'loopscope\[a_folder_of_runs\]'"):
        require_package("a_folder_of_runs", "Sink 'some'", "a_folder_of_runs")
