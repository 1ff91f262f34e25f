"""How other people's systems are started: the words that a user of each would type. Pure.

Each is a function of `Start`. Where a system has no launcher of its own (`together`), its users write such words into
scripts or let a cluster do it.
"""

from __future__ import annotations

import json
from pathlib import Path

from bench.compare.system import Commands, Start
from bench.compare.together import SEPARATOR

IDENTITY, NAME = "identity", "identity.txt"
DEEPSPEED_OPERATION = "deepspeed_shm_comm"


def itself(start: Start) -> Commands:
    """The user's program starts its workers."""
    return [[start.python, str(start.driver)]]


def accelerate(start: Start) -> Commands:
    """`--cpu --num_processes 2` runs one worker, silently. `--multi_gpu` is its launcher of several processes; the
    program itself asks for the CPU."""
    (port,) = start.ports(1)
    words = ["--multi_gpu", "--num_processes", str(start.workers), "--num_machines", "1", "--mixed_precision", "no"]
    words += ["--dynamo_backend", "no", "--main_process_ip", "127.0.0.1", "--main_process_port", str(port)]
    return [[start.python, "-m", "accelerate.commands.launch", *words, str(start.driver)]]


def ray(start: Start) -> Commands:
    """Ray's files go to the task's folder, and with it."""
    return [["env", f"RAY_TMPDIR={start.folder}", start.python, str(start.driver)]]


def deepspeed(start: Start) -> Commands:
    (port,) = start.ports(1)
    words = ["--num_accelerators", str(start.workers), "--master_addr", "127.0.0.1", "--master_port", str(port)]
    return [[*_extensions(start), start.python, "-m", "deepspeed.launcher.runner", *words, str(start.driver)]]


def deepspeed_compiled(start: Start) -> Commands:
    """DeepSpeed compiles an operation when it is first used on a CPU, for minutes: not what the first step is about."""
    if (_extensions_folder(start) / DEEPSPEED_OPERATION / f"{DEEPSPEED_OPERATION}.so").exists():
        return []
    code = "import deepspeed.accelerator as a; a.get_accelerator().create_op_builder('ShareMemCommBuilder').load()"
    return [[*_extensions(start), start.python, "-c", code]]


def torchft(start: Start) -> Commands:
    """Every replica is a torchrun of its own, as in torchft's examples; at the lighthouse they find each other."""
    meeting, *ports = start.ports(1 + start.workers)
    lighthouse = [_program(start, "torchft_lighthouse"), "--bind", f"127.0.0.1:{meeting}"]
    lighthouse += ["--min_replicas", str(start.workers)]
    torchrun = [start.python, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--master-addr", "127.0.0.1"]
    replicas = [
        [
            "env", f"TORCHFT_LIGHTHOUSE=http://127.0.0.1:{meeting}", f"REPLICA_GROUP_ID={number}",
            *torchrun, "--master-port", str(port), str(start.driver),
        ]
        for number, port in enumerate(ports)
    ]  # fmt: skip
    return [_together(start, replicas), lighthouse]


def hivemind(start: Start) -> Commands:
    """`hivemind-dht` is a peer that only knows the others; it has the identity that was made for it."""
    (port,) = start.ports(1)
    address = f"/ip4/127.0.0.1/tcp/{port}"
    meeting_place = [_program(start, "hivemind-dht"), "--host_maddrs", address]
    meeting_place += ["--identity_path", str(start.folder / IDENTITY)]
    named = f"{address}/p2p/{(start.folder / NAME).read_text()}"
    peers = [[start.python, str(start.driver), str(number), named] for number in range(start.workers)]
    return [_together(start, [_after(port, peer) for peer in peers]), meeting_place]


def hivemind_identity(start: Start) -> Commands:
    code = "import sys; from hivemind.p2p import P2P, PeerID; P2P.generate_identity(sys.argv[1]); "
    code += "open(sys.argv[2], 'w').write(str(PeerID.from_identity(open(sys.argv[1], 'rb').read())))"
    return [[start.python, "-c", code, str(start.folder / IDENTITY), str(start.folder / NAME)]]


def horovod(start: Start) -> Commands:
    words = ["--gloo", "--network-interfaces", "lo", "-np", str(start.workers), "-H", f"localhost:{start.workers}"]
    return [[_program(start, "horovodrun"), *words, start.python, str(start.driver)]]


def tf_mirrored(start: Start) -> Commands:
    cluster = {"worker": [f"127.0.0.1:{port}" for port in start.ports(start.workers)]}
    return [_together(start, [_tf(start, cluster, "worker", number) for number in range(start.workers)])]


def tf_servers(start: Start) -> Commands:
    """One server, as other systems have in this comparison. The chief, which is first, ends the run."""
    chief, server, *workers = (f"127.0.0.1:{port}" for port in start.ports(2 + start.workers))
    cluster = {"chief": [chief], "ps": [server], "worker": workers}
    return [_tf(start, cluster, role, number) for role, tasks in cluster.items() for number in range(len(tasks))]


def _tf(start: Start, cluster: dict[str, list[str]], role: str, number: int) -> list[str]:
    config = json.dumps({"cluster": cluster, "task": {"type": role, "index": number}})
    return ["env", f"TF_CONFIG={config}", start.python, str(start.driver)]


def _together(start: Start, commands: Commands) -> list[str]:
    words = [word for command in commands for word in (SEPARATOR, *command)]
    return [start.python, "-m", "bench.compare.together", *words]


def _after(port: int, command: list[str]) -> list[str]:
    """The command, as soon as somebody listens at that port."""
    wait = f"until (exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null; do sleep 0.05; done"
    return ["bash", "-c", f'{wait}; exec "$@"', "bash", *command]


def _program(start: Start, name: str) -> str:
    return str(Path(start.python).parent / name)


def _extensions_folder(start: Start) -> Path:
    return Path(start.python).parent.parent / "torch_extensions"


def _extensions(start: Start) -> list[str]:
    return ["env", f"TORCH_EXTENSIONS_DIR={_extensions_folder(start)}"]
