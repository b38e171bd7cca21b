"""Maps the repository's top-level folders to the package ``pdserve``.

The repository root *is* the package, so ``scheduler/`` installs as ``pdserve.scheduler``. The list of
packages is derived from the tree: a new subpackage can't be forgotten, and nothing but ``pdserve`` is installed.
"""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
NOT_PRODUCT = {"tests", "docker", "docs"}
folders = sorted(p.parent.name for p in ROOT.glob("*/__init__.py") if p.parent.name not in NOT_PRODUCT)
package_dir = {f"pdserve.{name}": name for name in folders}
packages = [f"pdserve.{name}" for name in folders]
for name in folders:
    packages += [f"pdserve.{name}.{sub}" for sub in find_packages(str(ROOT / name))]

data = [f"**/*.{ending}" for ending in ("cpp", "h", "yaml", "md", "txt")]

setup(packages=packages, package_dir=package_dir, package_data={"": data})
