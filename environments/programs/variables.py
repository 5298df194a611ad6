"""The environment variables of a program: a few of this process, where the chat API is, and those of the configuration.

All others stay here, since they may be secrets of the run.
"""

import os
from collections.abc import Mapping
from urllib.parse import urlsplit

from environments.gateway.session import Endpoint

_PASSED_ON = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TZ", "TMPDIR", "LANG", "LANGUAGE"),
    *("LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"),
    *("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "NODE_PATH"),
)
_PREFIXES_PASSED_ON = ("LC_", "OMP_", "MKL_", "OPENBLAS_")


def variables_of(endpoint: Endpoint, own: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a program that calls this endpoint; `own` are the variables of its configuration.

    The names are those that the clients of OpenAI and Anthropic read, and frameworks that are built on them.
    """
    passed_on = {
        name: value for name, value in os.environ.items() if name in _PASSED_ON or name.startswith(_PREFIXES_PASSED_ON)
    }
    root = endpoint.base_url.removesuffix("/v1")  # Anthropic's client adds /v1 itself
    host = urlsplit(endpoint.base_url).hostname or ""
    of_api = {
        "OPENAI_BASE_URL": endpoint.base_url,
        "OPENAI_API_BASE": endpoint.base_url,  # of older clients, and of litellm
        "OPENAI_API_KEY": endpoint.api_key,
        "OPENAI_MODEL": endpoint.model,
        "OPENAI_AGENTS_DISABLE_TRACING": "1",  # traces would go to OpenAI
        "ANTHROPIC_BASE_URL": root,
        "ANTHROPIC_API_KEY": endpoint.api_key,
        "ANTHROPIC_MODEL": endpoint.model,
        "NO_PROXY": host,
        "no_proxy": host,
    }
    return {"PYTHONUNBUFFERED": "1", **passed_on, **of_api, **own}
