"""Does what README says on a fresh Debian 12: makes one with mmdebstrap or debootstrap, copies a clone of this tree into it, and runs
there, as a user with sudo, ./dev demo, then the wheel's way to a running program. Prints what each step took, and how much was
computed in it: on a machine that has other work meanwhile that is what tells.

usage: fresh_root_test.py [--test] [--keep FOLDER]

--test also runs ./dev test. Each figure has its bar; a figure above it is a failure. Downloads are taken apart and have none.
The root, its processes and its mounts are in namespaces of their own and vanish with the test; with --keep the folder stays.
What this machine needs to reach packages (apt's sources, resolv.conf, certificates, pip's variables) is copied into the root.
Exit code 77, with the reason, where mmdebstrap and debootstrap are missing or namespaces are not allowed. As root, 12 GB of disk.
"""
import argparse
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time

from wheel_test import SOURCE, page_block, write_project

SKIPPED = 77
USER = "reader"
BARS = {"demo": 300, "wheel to a running program": 120}  # seconds on two cores, after the downloads
PACKAGES = "ca-certificates,sudo,git"
# What apt and pip are told about this machine's network; none of it is written down in this project.
COPIED = ("/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")
TOLD = re.compile(r"(PIP_|SSL_CERT_|REQUESTS_CA_BUNDLE$|CURL_CA_BUNDLE$|https?_proxy$|no_proxy$)", re.I)


def wheel_script():
    """What docs/howto/install.md says after ./dev wheel, and a file where the download of torch has ended."""
    install = page_block("./dev wheel").splitlines()
    torch = [at for at, line in enumerate(install) if line.startswith("pip install torch==")]
    if install[0] != "./dev wheel" or len(torch) != 1:
        sys.exit(f"fresh root: docs/howto/install.md has another way to install a wheel: {install}")
    install.insert(torch[0] + 1, "touch ~/environment/.downloaded")
    return "\n".join(["set -e", *install[1:], "cd ~/project", page_block("python -m weft --cmake-prefix")])


def run(command, **options):
    print("+", " ".join(command), flush=True)
    done = subprocess.run(command, check=False, **options)
    if done.returncode:
        sys.exit(f"fresh root: ended with {done.returncode}: {' '.join(command)}")


def make_root(root):
    """The packages that a machine with a user and a clone has; no index is left, as on one that was just installed."""
    if shutil.which("mmdebstrap"):
        run(["mmdebstrap", "--quiet", "--mode=root", "--variant=minbase", f"--include={PACKAGES}", "bookworm", root])
    else:
        run(["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", root], stdout=subprocess.DEVNULL)
    for path in COPIED + tuple(glob.glob("/etc/apt/sources.list*") + glob.glob("/etc/apt/apt.conf.d/*proxy*")):
        if os.path.isdir(path):
            shutil.copytree(path, root + path, dirs_exist_ok=True)
        elif os.path.exists(path):
            shutil.copyfile(path, root + path)
    run(["chroot", root, "useradd", "--create-home", "--shell", "/bin/bash", USER])
    with open(os.path.join(root, "etc/sudoers.d", USER), "w") as file:
        file.write(f"{USER} ALL=(ALL) NOPASSWD:ALL\n")
    home = os.path.join(root, "home", USER)
    run(["git", "clone", "--quiet", "--no-hardlinks", SOURCE, os.path.join(home, "weft")])
    write_project(os.path.join(home, "project"))
    run(["chroot", root, "chown", "-R", f"{USER}:{USER}", f"/home/{USER}"])


def as_user(root, script, wanted):
    """Runs it as a login of the user would, prints each line as it comes; returns the seconds, and when it began."""
    environment = {name: value for name, value in os.environ.items() if TOLD.match(name)}
    environment.update(TERM="dumb", LANG="C.UTF-8", PATH="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                       HOME=f"/home/{USER}", USER=USER)
    begin = time.time()
    process = subprocess.Popen(["chroot", "--userspec", f"{USER}:{USER}", root, "bash", "-c", f"cd ~/weft\n{script}"],
                               env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               errors="replace")
    said = ""
    for line in process.stdout:
        said += line
        print(f"{time.time() - begin:7.1f}  {line}", end="", flush=True)
    if process.wait() or not re.search(wanted, said):
        sys.exit(f"fresh root: ended with {process.returncode}, wanted was {wanted!r}:\n{script}")
    return time.time() - begin, begin


def inside(args):
    """In namespaces of mounts and processes: what is mounted and started here ends with this."""
    root = args.inside
    make_root(root)
    for kind, place in (("proc", "proc"), ("sysfs", "sys")):
        run(["mount", "-t", kind, kind, os.path.join(root, place)])
    run(["mount", "--rbind", "/dev", os.path.join(root, "dev")])
    times, computed = {}, {}
    home = os.path.join(root, "home", USER)

    def timed(name, script, wanted, marker):
        before = os.times()
        seconds, begin = as_user(root, script, wanted)
        after = os.times()
        computed[name] = after.children_user + after.children_system - before.children_user - before.children_system
        found = glob.glob(os.path.join(home, marker)) if marker else []
        downloads = os.path.getmtime(found[0]) - begin if found else 0
        times[name] = seconds - downloads
        if downloads:
            times[f"{name}: downloads before"] = downloads

    timed("demo", "./dev demo", r"demo: ok accuracy=0\.9", ".cache/weft/lean-*/.complete")
    if args.test:
        timed("test", "./dev test", r"100% tests passed", ".cache/weft/full-*/.complete")
    timed("wheel, its build", "./dev wheel", r"wheel: ok", None)
    timed("wheel to a running program", wheel_script(), r"(?s)(0 1 2 3 doubled and summed: 12.*){2}", "environment/.downloaded")
    print(f"\nfresh root, {os.cpu_count()} cores, {subprocess.check_output(['git', '-C', SOURCE, 'describe', '--always'], text=True).strip()}:")
    failed = False
    for name, seconds in times.items():
        bar = BARS.get(name)
        failed = failed or bool(bar and seconds > bar)
        cpu = f", {computed[name]:.0f} s of CPU" if name in computed else ""
        print(f"{name:45} {seconds:7.0f} s{cpu}{f'  (bar {bar})' if bar else ''}{'  MISSED' if bar and seconds > bar else ''}")
    return 1 if failed else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--test", action="store_true")
    parser.add_argument("--keep")
    parser.add_argument("--inside")
    args = parser.parse_args()
    if args.inside:
        return inside(args)
    if not shutil.which("mmdebstrap") and not shutil.which("debootstrap"):
        print("skipped: neither mmdebstrap nor debootstrap is installed")
        return SKIPPED
    alone = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    if subprocess.run(alone + ["true"], capture_output=True).returncode:
        print("skipped: no right to make namespaces of mounts and processes here")
        return SKIPPED
    folder = args.keep or tempfile.mkdtemp(prefix="weft-fresh-", dir=os.environ.get("WEFT_FRESH_ROOT_DIR"))
    try:
        os.chmod(folder, 0o755)  # the user has to come through
        command = [*alone, sys.executable, os.path.abspath(__file__), "--inside", os.path.join(folder, "root")]
        return subprocess.run(command + (["--test"] if args.test else []), check=False).returncode
    finally:
        if not args.keep:
            shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
