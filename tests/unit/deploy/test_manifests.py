"""deploy/k8s as kustomize renders it: valid, with no more rights than needed, and refused if it cannot run."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from deploy.k8s.check import check
from deploy.placement import PORTS
from splitppo.config import ConfigError
from tests.support.groups import PROJECT

pytestmark = pytest.mark.slow

K8S = PROJECT / "deploy" / "k8s"
FOLDERS = ("base", "gpu")
# The oldest that has what is used, and the newest that the library knows.
VERSIONS = ("1.31", "1.37")
ROLES = (*PORTS, "controller")
Manifest = dict[str, Any]


@functools.cache
def render(name: str) -> str:
    """Returns the manifests that `kubectl kustomize` makes of a folder, or of the overlay with cert-manager."""
    if name == "base":
        return kustomize(K8S / name)
    with tempfile.TemporaryDirectory() as folder:
        copied = shutil.copytree(K8S, Path(folder) / "k8s") / name
        file = copied / "kustomization.yaml"
        file.write_text(file.read_text().replace("  # - ../cert-manager", "  - ../cert-manager"))
        return kustomize(copied)


def kustomize(folder: Path) -> str:
    kubectl = Path(sysconfig.get_path("scripts")) / "kubectl"
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def manifests(name: str) -> list[Manifest]:
    return list(yaml.safe_load_all(render(name)))


def of(found: Iterable[Manifest], kind: str, name: str) -> Manifest:
    (manifest,) = [manifest for manifest in found if (manifest["kind"], manifest["metadata"]["name"]) == (kind, name)]
    return manifest


def pod(job: Manifest) -> Manifest:
    spec: Manifest = job["spec"]["template"]["spec"]
    return spec


def validate(found: Iterable[Manifest], version: str) -> None:
    """Against the API's schemas; cert-manager's resources are none of Kubernetes' own."""
    for manifest in found:
        if not manifest["apiVersion"].startswith("cert-manager.io/"):
            kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize(("name", "version"), [("gpu", VERSIONS[0]), ("gpu", VERSIONS[1]), ("base", VERSIONS[1])])
def test_manifests_are_valid(name: str, version: str) -> None:
    found = manifests(name)
    assert {"Job", "Service", "NetworkPolicy", "PersistentVolumeClaim", "ConfigMap"} <= {
        manifest["kind"] for manifest in found
    }
    validate(found, version)


@pytest.mark.parametrize(
    "break_it",
    [
        lambda job: job["spec"].update(completion=2),
        lambda job: job["spec"].update(completions="two"),
        lambda job: pod(job)["securityContext"].update(runAsRoot=False),
        lambda job: pod(job)["containers"][0].pop("name"),
    ],
)
def test_a_wrong_field_is_found(break_it: Callable[[Manifest], object]) -> None:
    job = of(manifests("base"), "Job", "actor")
    break_it(job)
    with pytest.raises(kubernetes_validate.ValidationError):
        validate([job], VERSIONS[-1])


@pytest.mark.parametrize("name", FOLDERS)
def test_nothing_runs_with_more_rights_than_it_needs(name: str) -> None:
    jobs = [manifest for manifest in manifests(name) if manifest["kind"] == "Job"]
    assert {job["metadata"]["name"] for job in jobs} == {*ROLES, "prepare"}
    for job in jobs:
        spec = pod(job)
        (container,) = spec["containers"]
        assert not spec["automountServiceAccountToken"]
        assert (spec["securityContext"]["runAsNonRoot"], spec["securityContext"]["runAsUser"]) == (True, 10001)
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert "hostPath" not in str(spec["volumes"])


@pytest.mark.parametrize("name", FOLDERS)
def test_a_role_sees_its_own_secrets_and_nobody_the_authoritys_key(name: str) -> None:
    found = manifests(name)
    for job in (manifest for manifest in found if manifest["kind"] == "Job"):
        role = job["metadata"]["name"]
        volumes = [volume["projected"]["sources"] for volume in pod(job)["volumes"] if "projected" in volume]
        seen = {source["secret"]["name"] for sources in volumes for source in sources}
        own = {f"{role}-tls", "token"} if role != "prepare" else set()
        assert seen == (own | {"health-tls"} if role in PORTS else own)


def may_connect(found: list[Manifest], caller: dict[str, str], called: Manifest, port: int) -> bool:
    """Returns True if the policies let pods with these labels reach a port of the pods of a Job."""
    labels = called["spec"]["template"]["metadata"]["labels"]
    ports = {named["name"]: named["containerPort"] for named in pod(called)["containers"][0].get("ports", [])}
    policies = [
        policy["spec"]
        for policy in found
        if policy["kind"] == "NetworkPolicy" and policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    ]
    rules = [rule for policy in policies for rule in policy.get("ingress", [])]
    return not policies or any(
        any(peer["podSelector"]["matchLabels"].items() <= caller.items() for peer in rule["from"])
        and (not rule.get("ports") or port in [ports[allowed["port"]] for allowed in rule["ports"]])
        for rule in rules
    )


@pytest.mark.parametrize("name", FOLDERS)
def test_a_groups_port_is_the_controllers_and_all_others_are_its_own_pods(name: str) -> None:
    found = manifests(name)
    jobs = {role: of(found, "Job", role) for role in (*ROLES, "prepare")}
    callers = {role: job["spec"]["template"]["metadata"]["labels"] for role, job in jobs.items()}
    callers["stranger"] = {"app": "another"}
    rendezvous, any_other = 29500, 41234
    for called, job in jobs.items():
        for port in (*PORTS.values(), rendezvous, any_other):
            allowed = {caller for caller, labels in callers.items() if may_connect(found, labels, job, port)}
            expected = {called} if called in PORTS else set()
            if PORTS.get(called) == port:
                expected = expected | {"controller"}
            assert allowed == expected, (called, port)


@pytest.mark.parametrize("name", FOLDERS)
def test_probes_show_a_certificate_and_ask_rank_0_alone(name: str) -> None:
    for role, port in PORTS.items():
        (container,) = pod(of(manifests(name), "Job", role))["containers"]
        assert {"name": "PORT", "value": str(port)} in container["env"]
        for probe in ("startupProbe", "readinessProbe"):
            *shell, script = container[probe]["exec"]["command"]
            assert shell == ["sh", "-c"]
            elsewhere = {"PATH": "/nowhere", "JOB_COMPLETION_INDEX": "1", "PORT": str(port)}
            assert subprocess.run(["/bin/sh", "-c", script], env=elsewhere).returncode == 0
            echoed = script.replace("exec python -m", "echo")
            first = subprocess.run(
                ["/bin/sh", "-c", echoed],
                env={**elsewhere, "JOB_COMPLETION_INDEX": "0"},
                capture_output=True,
                text=True,
            )
            secrets = "--ca /secrets/ca.pem --cert /secrets/health.pem --key /secrets/health.key"
            assert first.stdout.strip() == f"splitppo.rpc.health localhost:{port} {secrets}"


@pytest.mark.parametrize("name", FOLDERS)
def test_a_group_that_is_not_ready_can_be_called_and_there_is_one_pod_of_a_number(name: str) -> None:
    """A dirty group is not ready until a controller, perhaps a new one, has restored it."""
    found = manifests(name)
    for role in PORTS:
        service = of(found, "Service", role)["spec"]
        assert service["publishNotReadyAddresses"]
        assert service["selector"]["batch.kubernetes.io/job-completion-index"] == "0"
        job = of(found, "Job", role)["spec"]
        assert job["podReplacementPolicy"] == "Failed"


def test_numbers_of_settings_env_are_those_of_jobs_and_gpus() -> None:
    found = manifests("gpu")
    for role, num_nodes, num_gpus in (("actor", 2, 8), ("critic", 1, 8)):
        job = of(found, "Job", role)
        assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (num_nodes, num_nodes)
        assert pod(job)["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == num_gpus


@pytest.mark.parametrize("name", FOLDERS)
def test_a_run_that_the_manifests_can_start_has_a_batch_plan(name: str) -> None:
    assert check(manifests(name)).startswith("step: ")


def test_numbers_and_the_patch_of_the_overlay_are_all_that_a_rollout_group_needs(tmp_path: Path) -> None:
    overlay = shutil.copytree(K8S, tmp_path / "k8s") / "gpu"
    with (overlay / "settings.env").open("a") as file:
        file.write("ROLLOUT_NODES=3\nROLLOUT_GPUS=4\n")
    kustomization = overlay / "kustomization.yaml"
    patches = re.sub(r"^  # (?=- target|  patch)", "  ", kustomization.read_text(), flags=re.MULTILINE)
    kustomization.write_text(patches.replace("name: reward}   #", "name: rollout}   #"))
    found = list(yaml.safe_load_all(kustomize(overlay)))
    validate(found, VERSIONS[-1])
    assert check(found).startswith("step: ")
    assert of(found, "PersistentVolumeClaim", "storage")["spec"]["storageClassName"] == "nfs"
    job = of(found, "Job", "rollout")
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (3, 3)
    assert pod(job)["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 4


def settings(found: list[Manifest]) -> dict[str, str]:
    (data,) = [manifest["data"] for manifest in found if manifest["metadata"]["name"].startswith("settings-")]
    return data


def two_critic_nodes_in_one_place(found: list[Manifest]) -> None:
    settings(found)["CRITIC_NODES"] = "2"


def other_gpus(found: list[Manifest]) -> None:
    settings(found)["ACTOR_GPUS"] = "4"


def not_shared(found: list[Manifest]) -> None:
    of(found, "PersistentVolumeClaim", "storage")["spec"]["accessModes"] = ["ReadWriteOnce"]


def one_port(found: list[Manifest]) -> None:
    of(found, "Service", "critic")["spec"]["ports"][0]["port"] = 7001


def no_name(found: list[Manifest]) -> None:
    of(found, "Certificate", "critic")["spec"]["dnsNames"] = ["localhost"]


def a_reward_group(found: list[Manifest]) -> None:
    of(found, "Job", "reward")["spec"]["suspend"] = False


def a_suspended_rollout_group(found: list[Manifest]) -> None:
    settings(found)["ROLLOUT_NODES"] = "1"


def a_rollout_group_in_the_recipe_alone(found: list[Manifest]) -> None:
    settings(found)["OVERRIDES"] += " services.rollout.num_processes=8"


def no_claim(found: list[Manifest]) -> None:
    found.remove(of(found, "PersistentVolumeClaim", "storage"))


def nothing_of_ours(found: list[Manifest]) -> None:
    found[:] = [{"kind": "List"}]


def no_critic(found: list[Manifest]) -> None:
    settings(found)["OVERRIDES"] += " algorithm.adv_estimator=grpo rollout.n=2"


def no_number(found: list[Manifest]) -> None:
    settings(found)["ACTOR_NODES"] = "two"


def another_file(found: list[Manifest]) -> None:
    settings(found)["RECIPE"] = "/recipe/mine.yaml"


def does_not_divide(found: list[Manifest]) -> None:
    settings(found)["OVERRIDES"] += " actor.ppo_mini_batch_size=70"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (two_critic_nodes_in_one_place, "CRITIC_NODES is 2, but completions of Job/critic is 1"),
        (other_gpus, "ACTOR_GPUS is 4, but nvidia.com/gpu of Job/actor is 8"),
        (not_shared, "the claim storage is ReadWriteOnce, but 4 pods share it: expected ReadWriteMany"),
        (one_port, "Service/critic has port 7001, expected 7002"),
        (no_name, "dnsNames of Certificate/critic are localhost, expected critic too: the controller calls it"),
        (a_reward_group, "REWARD_NODES is 0, but Job/reward is not suspended"),
        (a_suspended_rollout_group, "ROLLOUT_NODES is 1, but Job/rollout is suspended"),
        (
            a_rollout_group_in_the_recipe_alone,
            "ROLLOUT_NODES is 0, but this recipe has a group rollout: expected 1 or more",
        ),
        (no_claim, "PersistentVolumeClaim/storage is missing: expected what kubectl kustomize makes of"),
        (nothing_of_ours, "Job/actor is missing"),
        (no_critic, "CRITIC_NODES is 1, but this recipe has no group critic: expected 0"),
        (no_number, "ACTOR_NODES is 'two', expected a number"),
        (another_file, "RECIPE is '/recipe/mine.yaml', but the ConfigMap recipe has no files"),
        (does_not_divide, "ppo_mini_batch_size"),
    ],
)
def test_what_cannot_run_is_one_sentence(change: Callable[[list[Manifest]], None], sentence: str) -> None:
    found = manifests("gpu")
    change(found)
    with pytest.raises(Exception, match=r"\w") as refused:
        check(found)
    assert sentence in str(refused.value)
    assert isinstance(refused.value, ConfigError) or "expected a number" in sentence
