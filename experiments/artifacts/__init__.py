"""Tables and figures of the suite, one file each, named after what follows `make reproduce-`."""

from __future__ import annotations

from experiments.artifacts import table1, table2, table5, tune_table2
from experiments.artifacts.artifact import Artifact
from experiments.checks import nearest

ARTIFACTS: dict[str, Artifact] = {
    a.name: a for a in (table1.ARTIFACT, table2.ARTIFACT, table5.ARTIFACT, tune_table2.ARTIFACT)
}


def get(name: str) -> Artifact:
    """The artifact of a name. Raises a ValueError naming the nearest one."""
    if name not in ARTIFACTS:
        raise ValueError(f"no artifact {name!r}{nearest(name, ARTIFACTS)}; there are {', '.join(ARTIFACTS)}")
    return ARTIFACTS[name]
