"""Maps the repository's top-level folders to the package ``pdserve``.

The repository root *is* the package, so ``scheduler/`` installs as ``pdserve.scheduler``. The list of
packages is derived from the tree: a new subpackage can't be forgotten, and nothing but ``pdserve`` is installed.

Where ``make wheel`` has built the CPU kernels into the tree, a wheel carries them, and its name says which systems can
load them.
"""

import re
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel

ROOT = Path(__file__).parent
NOT_PRODUCT = {"tests", "docker", "docs", "tools"}
LIBRARIES = sorted((ROOT / "model_runner/cpu_engine/prebuilt").glob("*.so"))
# The newest GLIBCXX_3.4.N that a system of each manylinux_2_M has, as auditwheel's policies tell.
MANYLINUX_OF_GLIBCXX = {19: 17, 24: 28, 28: 31, 29: 34, 30: 35, 33: 39}


def platform_tag(libraries: list[Path]) -> str:
    """Return the tag of the oldest systems with every version of the C and C++ libraries that ``libraries`` need."""
    names = b"".join(library.read_bytes() for library in libraries)
    glibc = max((int(n) for n in re.findall(rb"\0GLIBC_2\.(\d+)", names)), default=17)
    glibcxx = max((int(n) for n in re.findall(rb"\0GLIBCXX_3\.4\.(\d+)", names)), default=0)
    minor = next((minor for newest, minor in MANYLINUX_OF_GLIBCXX.items() if glibcxx <= newest), None)
    # Newer than any policy we know: all that can be said is that it was built on Linux.
    return "linux_x86_64" if minor is None else f"manylinux_2_{max(glibc, minor)}_x86_64"


class PlatformDistribution(Distribution):
    """The distribution, which is one of the platform if there are libraries."""

    def has_ext_modules(self) -> bool:
        """Return whether it is installed among compiled packages."""
        return bool(LIBRARIES)


class PlatformWheel(bdist_wheel):
    """A wheel for all versions of Python, because the libraries don't use Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of the systems that may install the wheel."""
        return ("py3", "none", platform_tag(LIBRARIES)) if LIBRARIES else super().get_tag()


folders = sorted(p.parent.name for p in ROOT.glob("*/__init__.py") if p.parent.name not in NOT_PRODUCT)
package_dir = {f"pdserve.{name}": name for name in folders}
packages = [f"pdserve.{name}" for name in folders]
for name in folders:
    packages += [f"pdserve.{name}.{sub}" for sub in find_packages(str(ROOT / name))]

data = [f"**/*.{ending}" for ending in ("cpp", "h", "yaml", "md", "txt", "so")]

setup(
    packages=packages,
    package_dir=package_dir,
    package_data={"": data},
    distclass=PlatformDistribution,
    cmdclass={"bdist_wheel": PlatformWheel},
)
