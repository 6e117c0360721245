"""Without DuckDB the command says what to install."""

import sys

import pytest

from esper_soa.query import main


def test_a_missing_duckdb_is_told_with_the_extra_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    monkeypatch.delitem(sys.modules, "esper_soa.telemetry.database", raising=False)
    with pytest.raises(SystemExit) as ended:
        main([".", "select 1"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: queries need DuckDB: pip install 'esper-soa[query]'\n"
