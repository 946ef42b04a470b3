"""Requests made from our own OpenAPI description, valid and invalid ones: every check that schemathesis has for one
server."""

import subprocess
import sys

import pytest
from tests.support.serving import make_run, served

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
    "negative_data_rejection",
    "positive_data_acceptance",
    "missing_required_header",
    "unsupported_method",
    "ignored_auth",
)
EXAMPLES = [15, pytest.param(200, marks=pytest.mark.exhaustive)]


def found_by_schemathesis(server, *options, examples):
    """Its exit code and what it says."""
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run"),
        f"{server.address}/openapi.json",
        *("--checks", ",".join(CHECKS), "--max-examples", str(examples), "--no-color"),
        *("--generation-deterministic", "--seed", "1", "--phases", "coverage,fuzzing"),
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("examples", EXAMPLES)
def test_no_check_fails_on_any_path(tmp_path, examples):
    (tmp_path / "keys").write_text("key\n")
    # room for every prompt that is made, as the description cannot say how many tokens a text has; short answers
    folder = make_run(tmp_path / "tiny", **{"model.max_seq_len": 8192})
    options = ("--max-n", "2", "--max-answer", "4", "--api-key-file", str(tmp_path / "keys"))
    with served(folder, *options) as server:
        key = ("-H", "Authorization: Bearer key")
        code, said = found_by_schemathesis(server, *key, examples=examples)
        assert code == 0, said
