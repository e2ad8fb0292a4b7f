"""An engine over several nodes in a LeaderWorkerSet: mpirun of the leader starts the ranks of the other pods by ssh.

As tools/serve_nodes.py does with mpirun on hosts of one's own. Each other pod runs an sshd without rights, which takes
one key; hosts and who may log in have the same pair, since whoever has the keys' volume is of the deployment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tools.manifests.plan import KEYS, PodSet
from tools.serve_nodes import PASSED_ON, check_words

SSH_PORT = 2222
SSH_FILES = ("ssh", "ssh.pub", "ssh.hosts")  # of the volume of keys: the pair, and whom a client knows by it
_OPTIONS = (
    f"-p {SSH_PORT} -i {KEYS}/ssh -o IdentitiesOnly=yes -o BatchMode=yes -o ConnectTimeout=5"
    f" -o UserKnownHostsFile={KEYS}/ssh.hosts -o StrictHostKeyChecking=yes"
)
SSH_ENV = [
    {"name": "OMPI_MCA_plm_rsh_agent", "value": "ssh"},
    {"name": "OMPI_MCA_plm_rsh_args", "value": _OPTIONS},
]
# What mpirun starts there needs the image's own paths, which a login does not have.
RANK_COMMAND = [
    "sh", "-c",
    f"exec /usr/sbin/sshd -D -e -f /dev/null -p {SSH_PORT} -h {KEYS}/ssh -o AuthorizedKeysFile={KEYS}/ssh.pub"
    " -o StrictModes=no -o UsePAM=no -o PasswordAuthentication=no -o KbdInteractiveAuthentication=no -o PidFile=none"
    ' -o "SetEnv=PATH=$PATH LD_LIBRARY_PATH=$LD_LIBRARY_PATH"',
]  # fmt: skip
# The leader drains first: a pod with ranks stays until they have ended.
RANK_PRE_STOP = ["sh", "-c", "while grep -qsxE 'orted|prted' /proc/[0-9]*/comm; do sleep 1; done"]


def node_role(pods: PodSet) -> str:
    """Return the label of the pods that have ranks alone: no server, so no client of a Service goes there."""
    return f"{pods.role}-ranks"


def group_hosts(name: str, pods: PodSet) -> list[str]:
    """Return the names of a group's pods, its leader first, by the leader's POD_NAME."""
    return [f"$(POD_NAME).{name}", *(f"$(POD_NAME)-{number}.{name}" for number in range(1, pods.num_nodes))]


def wait_for(hosts: Sequence[str]) -> list[str]:
    """Return a command that ends once each takes the key: mpirun would give up."""
    names = " ".join(hosts)
    return ["sh", "-c", f"for host in {names}; do until ssh {_OPTIONS} $host true; do sleep 2; done; done"]


def mpirun(
    serve: Sequence[str], hosts: Sequence[str], num_gpus: int, environment: Sequence[dict[str, Any]]
) -> list[str]:
    """Return the leader's command. Raises ConfigError for a word that can't go through it."""
    given = {variable["name"] for variable in environment}
    passed = [word for name in PASSED_ON if name in given for word in ("-x", name)]
    server = ["trtllm-llmapi-launch", *serve]
    check_words(server)
    places = ",".join(f"{host}:{num_gpus}" for host in hosts)
    return ["mpirun", "-np", str(num_gpus * len(hosts)), "--host", places, *passed, *server]
