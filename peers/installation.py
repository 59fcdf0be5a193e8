"""Versions, and the bytes on disk of torch with all packages that it requires; one JSON line."""
import json
import platform
import re
from importlib import metadata

import torch


def add_with_requirements(requirement, found):
    """Adds the distribution that a requirement such as "cuda-toolkit[cublas]==13" names, and what that one requires."""
    name, extras = re.match(r"([\w.-]+)(?:\[([^]]*)\])?", requirement).groups()
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return  # not for this system
    if distribution.metadata["Name"] in found:
        return
    found[distribution.metadata["Name"]] = distribution
    for required in distribution.requires or []:
        extra = re.search(r"extra == ['\"](.+?)['\"]", required)
        if extra is None or extra.group(1) in (extras or "").split(","):
            add_with_requirements(required, found)


def num_bytes(distribution):
    paths = (file.locate() for file in distribution.files or [])
    return sum(path.stat().st_size for path in paths if path.is_file())


found = {}
add_with_requirements("torch", found)
print(json.dumps({"python": platform.python_version(), "torch": torch.__version__,
                  "installed_bytes": sum(map(num_bytes, found.values()))}))
