"""Kernels compiled for GPUs that are not there, for tests of what the compiler makes of them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

COMPILE = """
import json, subprocess, sys, tempfile
from importlib import import_module
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

module, name, types, constants, capability, options = json.loads(sys.argv[1])
kernel = getattr(import_module(module), name)
signature, attributes = {}, {}
for i, parameter in enumerate(p.name for p in kernel.params):
    signature[parameter] = "constexpr" if parameter in constants else types.get(parameter, "i32")
    if signature[parameter].startswith("*") or "stride" in parameter:
        attributes[(i,)] = [["tt.divisibility", 16]]
source = ASTSource(kernel, signature, constants, attributes)
compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
    Path(file.name).write_bytes(compiled.asm["cubin"])
    sass, use = (
        subprocess.run([cuobjdump, flag, file.name], capture_output=True, text=True, check=True).stdout
        for flag in ("-sass", "-res-usage")
    )
print(json.dumps({"ptx": compiled.asm["ptx"], "sass": sass, "shared": compiled.metadata.shared, "use": use}))
"""


def compile_for_hopper(
    kernel: str,
    types: dict[str, str],
    constants: dict[str, object],
    cache: Path,
    capability: int = 90,
    **options: int | bool | None,
) -> dict[str, str]:
    """PTX, SASS and resource use of ``module:kernel``, without a GPU: finds what the interpreter does not (types, layouts).

    In a process of its own, because the interpreter is chosen for a whole process. For Hopper unless another compute
    capability is asked for.
    """
    module, name = kernel.split(":")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(cache)}
    request = json.dumps([module, name, types, constants, capability, options])
    run = subprocess.run(
        [sys.executable, "-c", COMPILE, request], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout)


def loops(sass: str) -> list[list[str]]:
    """Instructions of every loop of a SASS listing, innermost ones included, longest last."""
    found = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", sass)
    place = {int(address, 16): i for i, (address, _) in enumerate(found)}
    bodies = []
    for i, (address, text) in enumerate(found):
        target = re.search(r"BRA.*?0x([0-9a-f]+)", text)
        if target and int(target[1], 16) < int(address, 16):
            bodies.append([name for _, name in found[place[int(target[1], 16)] : i + 1]])
    return sorted(bodies, key=len)


def opcode(instruction: str) -> str:
    """``LDL`` of ``@P0 LDL.64 R2, [R1]``."""
    return re.sub(r"@!?U?P\w+ ", "", instruction).split()[0].split(".")[0]
