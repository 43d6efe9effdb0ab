"""Tables and figures of the suite, one file each, named after what follows `make reproduce-`."""

from __future__ import annotations

from experiments.artifacts import table1, table2, table5, table6, table7, table8, tune_table2
from experiments.artifacts.artifact import Artifact
from experiments.checks import nearest

ARTIFACTS: dict[str, Artifact] = {
    module.ARTIFACT.name: module.ARTIFACT for module in (table1, table2, table5, table6, table7, table8, tune_table2)
}


def get(name: str) -> Artifact:
    """The artifact of a name. Raises a ValueError naming the nearest one."""
    if name not in ARTIFACTS:
        raise ValueError(f"no artifact {name!r}{nearest(name, ARTIFACTS)}; there are {', '.join(ARTIFACTS)}")
    return ARTIFACTS[name]
