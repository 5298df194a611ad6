"""The faults of TLS and tokens that the doctor reports: certificates that end, of strangers, for other hosts."""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from controller.commands.doctor.facts import Finding
from splitppo.rpc.bearer_tokens import BearerTokens
from splitppo.rpc.certificates import valid_until
from splitppo.rpc.credentials import Credentials
from tests.support.certificates import expire, last, rename, secure
from tests.unit.controller.commands.doctor.conftest import Serve, ask, credentials, external, identity, tree


async def ask_over_tls(serve: Serve, run_dir: Path, security: dict[str, Any], *groups: Credentials) -> list[Finding]:
    """The findings about an actor, and a critic, with these credentials."""
    served = [await serve(role, tree(run_dir), group) for role, group in zip(("actor", "critic"), groups, strict=False)]
    return (await ask(external(run_dir, *(group.address for group in served), security=security)))[1]


async def test_over_tls_with_a_token_the_end_of_every_certificate_is_known(
    serve: Serve, run_dir: Path, tmp_path: Path
) -> None:
    security = secure(tmp_path)
    last(tmp_path, "actor", days=5)
    [finding] = await ask_over_tls(serve, run_dir, security, credentials(tmp_path, "actor"))
    assert (finding.code, finding.about) == ("certificate", "actor")
    assert re.search(r"the certificate of the actor at .* ends in [45]\.\d days", finding.sentence)


async def test_a_certificate_that_is_expired_or_of_a_stranger_is_found(
    serve: Serve, run_dir: Path, tmp_path: Path
) -> None:
    security = secure(tmp_path / "ours")
    secure(tmp_path / "strangers")
    expire(tmp_path / "ours", "actor")
    findings = await ask_over_tls(
        serve, run_dir, security, credentials(tmp_path / "ours", "actor"), credentials(tmp_path / "strangers", "critic")
    )
    assert [(finding.code, finding.about) for finding in findings] == [("tls", "actor"), ("tls", "critic")]
    assert "certificate has expired" in findings[0].sentence
    assert "its certificate is not accepted" in findings[1].sentence


async def test_a_certificate_of_another_host_and_a_wrong_token_are_found(
    serve: Serve, run_dir: Path, tmp_path: Path
) -> None:
    security = secure(tmp_path)
    rename(tmp_path, "actor", "gpu-nine")
    other = replace(credentials(tmp_path, "critic"), tokens=BearerTokens(("another-token-of-the-tests-012",)))
    findings = await ask_over_tls(serve, run_dir, security, credentials(tmp_path, "actor"), other)
    assert [(finding.code, finding.about) for finding in findings] == [("tls", "actor"), ("token", "critic")]
    assert "does not name the host that it is called by" in findings[0].sentence
    assert "wrong token" in findings[1].sentence


async def test_a_group_without_tls_and_one_with_where_only_the_other_side_has_it(
    serve: Serve, run_dir: Path, tmp_path: Path
) -> None:
    security = secure(tmp_path)
    without, guarded = (
        await serve("actor", tree(run_dir)),
        await serve("actor", tree(run_dir), credentials(tmp_path, "actor")),
    )
    _, [finding] = await ask(external(run_dir, without.address, security=security))
    assert finding.code == "tls"
    assert "it does not speak TLS" in finding.sentence
    _, [finding] = await ask(external(run_dir, guarded.address))
    assert finding.code == "tls"


async def test_a_certificate_of_ones_own_that_has_expired_is_said_without_groups(run_dir: Path, tmp_path: Path) -> None:
    security = secure(tmp_path)
    expire(tmp_path, "controller")
    facts, [finding] = await ask(tree(run_dir, security=security))
    assert (finding.code, finding.about) == ("credentials", "run")
    assert "has expired" in finding.sentence
    assert "no run is live" in facts.notes[0]


def test_a_certificate_ends_when_the_first_of_those_behind_it_does(tmp_path: Path) -> None:
    secure(tmp_path)
    last(tmp_path, "actor", days=5)
    left = valid_until(identity(tmp_path, "actor")) - dt.datetime.now(dt.UTC)
    assert dt.timedelta(days=4.9) < left <= dt.timedelta(days=5)
