"""What a newcomer is told when something that weft needs is missing, or another one than it wants.

usage: faults_test.py --build FOLDER --cmake PROGRAM --compiler PROGRAM
"""
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(SOURCE, "scripts"))
import wheel  # noqa: E402
from wheel_test import fake_torch  # noqa: E402

OPTIONS = {}
PROJECT = """cmake_minimum_required(VERSION 3.22)
project(stranger LANGUAGES CXX)
find_package(weft REQUIRED)
"""


def libtorch(folder, version, flags):
    """A LibTorch as far as CMake looks at it."""
    major, minor, patch = version.split(".")
    for path, text in {
            "include/ATen/core/Tensor.h": "", "lib/libtorch_cpu.so": "", "lib/libc10.so": "",
            "include/torch/headeronly/version.h":
                f"#define TORCH_VERSION_MAJOR {major}\n#define TORCH_VERSION_MINOR {minor}\n#define TORCH_VERSION_PATCH {patch}\n",
            "share/cmake/Torch/TorchConfig.cmake": f'set(TORCH_CXX_FLAGS "{flags}")\n'}.items():
        os.makedirs(os.path.dirname(os.path.join(folder, path)), exist_ok=True)
        with open(os.path.join(folder, path), "w") as file:
            file.write(text)
    return folder


def program(folder, name, text):
    path = os.path.join(folder, name)
    with open(path, "w") as file:
        file.write(f"#!/bin/sh\n{text}\n")
    os.chmod(path, 0o755)


class Faults(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="weft-faults-")
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def dev(self, *arguments, wanted, **environment):
        done = subprocess.run([os.path.join(SOURCE, "dev"), *arguments], capture_output=True, text=True, timeout=100, check=False,
                              env={**os.environ, **environment})
        self.assertEqual(done.returncode, wanted, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def found_weft(self, torch):
        """CMake's words in a project that finds weft's package beside this LibTorch, on one line."""
        prefix = os.path.join(self.folder, "prefix")
        package = os.path.join(prefix, "lib", "cmake", "weft")
        os.makedirs(package)
        for folder, names in ((OPTIONS["--build"], ("weftConfig.cmake", "weftConfigVersion.cmake")),
                              (os.path.join(SOURCE, "cmake"), ("Dependencies.cmake", "FindLibTorch.cmake"))):
            for name in names:
                shutil.copy(os.path.join(folder, name), package)
        with open(os.path.join(self.folder, "CMakeLists.txt"), "w") as file:
            file.write(PROJECT)
        done = subprocess.run([OPTIONS["--cmake"], "-S", self.folder, "-B", os.path.join(self.folder, "build"),
                               f"-DCMAKE_PREFIX_PATH={prefix}", f"-DWEFT_LIBTORCH={torch}",
                               f"-DCMAKE_CXX_COMPILER={OPTIONS['--compiler']}"], capture_output=True, text=True, check=False)
        self.assertNotEqual(done.returncode, 0)
        return " ".join(done.stderr.split())

    def test_BadInput_a_libtorch_of_another_version(self):
        said = self.found_weft(libtorch(os.path.join(self.folder, "torch"), "9.1.0", ""))
        self.assertIn("weft was built with LibTorch 2.", said)
        self.assertIn("torch is 9.1.0: name a LibTorch 2.", said)

    def test_BadInput_a_libtorch_of_another_abi(self):
        with open(os.path.join(OPTIONS["--build"], "weftConfig.cmake")) as file:
            version = file.read().split("was built with LibTorch ")[1].split(",")[0]
        said = self.found_weft(libtorch(os.path.join(self.folder, "torch"), version, "-D_GLIBCXX_USE_CXX11_ABI=0"))
        self.assertIn("was built with _GLIBCXX_USE_CXX11_ABI=0, weft with 1: name a LibTorch with the C++11 ABI", said)

    def test_BadInput_a_torch_beside_the_wheel(self):
        # The wheel's package, in an environment with the torch that it was made with, another one, and none.
        os.makedirs(os.path.join(self.folder, "weft"))
        for name, text in (("__init__.py", wheel.INIT.format(version="1.2.3", torch="2.11.0")), ("__main__.py", wheel.MAIN)):
            with open(os.path.join(self.folder, "weft", name), "w") as file:
                file.write(text)
        next_step = "pip install torch==2.11.0"
        for version, words in (("2.11.4+cpu", None), ("2.12.0", ("was built with torch 2.11.0", "has 2.12.0", next_step)),
                               (None, ("needs torch 2.11.0", "there is none", next_step))):
            fake_torch(self.folder, version)
            # -S: without what this machine has installed.
            done = subprocess.run([sys.executable, "-S", "-m", "weft", "--cmake-prefix"], capture_output=True, text=True, check=False,
                                  env={**os.environ, "PYTHONPATH": self.folder}, cwd=self.folder)
            said = (done.stdout + done.stderr).strip()
            if words is None:
                self.assertEqual((done.returncode, said), (0, os.path.join(self.folder, "weft", "prefix")))
                continue
            self.assertEqual((done.returncode, said.count("\n")), (1, 0), said)
            for word in words:
                self.assertIn(word, said)

    def test_BadInput_an_install_prefix_without_rights(self):
        # Not even root makes a folder there.
        said = self.dev("install", "/proc/weft", wanted=2)
        self.assertEqual(said.strip().splitlines(),
                         ["dev: cannot write to /proc/weft: choose a folder of your own, for instance ./dev install $HOME/.local/weft"])

    def test_BadInput_a_package_is_missing_and_the_user_is_not_root(self):
        program(self.folder, "dpkg-query", 'case "$*" in *g++) exit 1 ;; *) printf installed ;; esac')
        program(self.folder, "id", "echo 1000")
        program(self.folder, "sudo", "exit 1")
        said = self.dev("build", wanted=2, PATH=self.folder + os.pathsep + os.environ["PATH"])
        self.assertIn("missing, and I am not root: g++", said)
        self.assertIn("apt-get update && apt-get install -y --no-install-recommends g++ ", said)

    def test_BadInput_FetchContent_without_a_network(self):
        # What docs/howto/install.md says for a machine without a network.
        with open(os.path.join(SOURCE, "docs", "howto", "install.md"), encoding="utf-8") as file:
            self.assertIn("-DFETCHCONTENT_SOURCE_DIR_WEFT=", file.read())
        with open(os.path.join(self.folder, "CMakeLists.txt"), "w") as file:
            file.write("cmake_minimum_required(VERSION 3.22)\nproject(stranger LANGUAGES CXX)\ninclude(FetchContent)\n"
                       f"FetchContent_Declare(weft GIT_REPOSITORY file://{self.folder}/nowhere GIT_TAG main)\n"
                       "FetchContent_MakeAvailable(weft)\nif(NOT TARGET weft::weft)\n  message(FATAL_ERROR \"no weft\")\nendif()\n")
        command = [OPTIONS["--cmake"], "-S", self.folder, "-B", os.path.join(self.folder, "build"),
                   f"-DCMAKE_CXX_COMPILER={OPTIONS['--compiler']}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        self.assertNotEqual(done.returncode, 0)
        done = subprocess.run([*command, f"-DFETCHCONTENT_SOURCE_DIR_WEFT={SOURCE}"], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    for flag in ("--build", "--cmake", "--compiler"):
        at = sys.argv.index(flag)
        OPTIONS[flag] = sys.argv[at + 1]
        del sys.argv[at:at + 2]
    unittest.main()
