"""Without DuckDB the command says what to install."""

import subprocess
import sys


def test_a_missing_duckdb_is_told_with_the_extra_to_install() -> None:
    hidden = (
        "import sys; sys.modules['duckdb'] = None; from esper_soa.query import main; "
        "main(['.', 'select 1'])"
    )
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        2,
        "error: queries need DuckDB: pip install 'esper-soa[query]'",
    )
