"""The values that services.security and the addresses may have together."""

from pathlib import Path

import pytest

from tests.support.configs import load, mistake


@pytest.mark.parametrize(
    "bind", ["0.0.0.0:1", "10.0.0.1:1", "[::]:1", "some.host:1", "127.0.0.1.some.host:1", ":1", "host", "::1:7001"]
)
def test_plaintext_beyond_this_machine_is_refused(tmp_path: Path, bind: str) -> None:
    sentence = mistake(tmp_path, f"services.actor.bind='{bind}'")
    assert sentence.startswith(f"services.actor.bind is '{bind}', which is not a loopback address")
    external = ("services.launch=external", f"services.critic.address='{bind}'")
    assert "services.critic.address is" in mistake(tmp_path, *external)


@pytest.mark.parametrize("bind", ["127.0.0.1:0", "127.1.2.3:7001", "localhost:7001", "[::1]:7001"])
def test_plaintext_on_this_machine_is_not(tmp_path: Path, bind: str) -> None:
    assert load(tmp_path, f"services.actor.bind='{bind}'").services.actor.bind == bind


def test_failpoints_stay_on_this_machine(tmp_path: Path) -> None:
    point = "debug={failpoints: {actor.update: {action: kill}}}"
    assert load(tmp_path, point).debug.failpoints
    sentence = mistake(tmp_path, point, "services.launch=external", "services.rollout.address=gpu-two:7004")
    assert sentence.startswith("debug.failpoints is for tests on one machine: expected a loopback address in services.")


def test_with_mutual_tls_a_service_may_be_reached_from_elsewhere(tmp_path: Path) -> None:
    files = ("ca_file=ca.pem", "cert_file='{role}.pem'", "key_file='{role}.key'")
    tls = [f"services.security.{key}" for key in ("tls=true", *files)]
    config = load(tmp_path, "services.actor.bind=0.0.0.0:7001", *tls)
    assert config.services.security.tls_files("critic") == (Path("ca.pem"), Path("critic.pem"), Path("critic.key"))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["tls=true"], "tls needs ca_file, cert_file and key_file; ca_file and cert_file and key_file not given"),
        (["tls=true", "ca_file=a", "cert_file=b"], "tls needs ca_file, cert_file and key_file; key_file not given"),
        (["cert_file=b"], "cert_file is given, but tls is false: set tls to true, or leave cert_file out"),
        (["token_file=a", "token_env=B"], "token_file and token_env are both given, expected one of them"),
    ],
)
def test_half_of_a_security_setting_is_refused(tmp_path: Path, overrides: list[str], sentence: str) -> None:
    said = mistake(tmp_path, *(f"services.security.{override}" for override in overrides))
    assert said == f"key 'services.security': {sentence}"


def test_a_token_does_not_belong_into_the_configuration(tmp_path: Path) -> None:
    assert "unknown key 'services.security.token'" in mistake(tmp_path, "services.security.token=abc")
    said = mistake(tmp_path, "services.security.token_env='no variable'")
    assert "services.security.token_env" in said
    assert "no variable" not in said, "it may be the token"


def test_failpoints_are_for_services_that_only_this_machine_reaches(tmp_path: Path) -> None:
    kill = "debug.failpoints={actor.update: {step: 1}}"
    assert load(tmp_path, kill).debug.failpoints
    tls = ("tls=true", "ca_file=ca.pem", "cert_file=a.pem", "key_file=a.key")
    said = mistake(tmp_path, kill, "services.actor.bind=0.0.0.0:7001", *(f"services.security.{key}" for key in tls))
    assert "expected a loopback address in services.actor.bind, got '0.0.0.0:7001'" in said
