"""scripts/release.py in a repository made for it: a dry run changes nothing, a release changes version, notes and tag.

usage: release_test.py SCRIPT
"""
import os
import subprocess
import sys
import tempfile
import unittest

SCRIPT = ""


class Release(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="weft-release-")
        self.addCleanup(folder.cleanup)
        self.root = folder.name
        self.git("init", "--quiet")
        self.write("CMakeLists.txt", 'cmake_minimum_required(VERSION 3.22)\nproject(weft VERSION 0.1.0 DESCRIPTION "x")\n')
        self.write("CHANGELOG.md", "# Changes\n\n## 0.1.0 (not released)\n\n- first\n\n### API\n\n- second\n")
        self.commit()

    def git(self, *words):
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false"]
        return subprocess.run(["git", *who, "-C", self.root, *words], check=True, capture_output=True, text=True).stdout.strip()

    def write(self, name, content):
        with open(os.path.join(self.root, name), "w", encoding="utf-8") as file:
            file.write(content)

    def read(self, name):
        with open(os.path.join(self.root, name), encoding="utf-8") as file:
            return file.read()

    def commit(self):
        self.git("add", "--all")
        self.git("commit", "--quiet", "-m", "x")

    def release(self, *words):
        who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@example.org", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@example.org"}
        return subprocess.run([sys.executable, SCRIPT, "--root", self.root, *words], env={**os.environ, **who}, capture_output=True, text=True, check=False)

    def refused(self, version, *parts):
        before = self.git("rev-parse", "HEAD")
        done = self.release(version, "--for-real")
        self.assertEqual(done.returncode, 1, done.stdout)
        for part in parts:
            self.assertIn(part, done.stderr)
        self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
        self.assertEqual(self.git("rev-parse", "HEAD"), before)

    def test_a_dry_run_changes_nothing(self):
        before = self.read("CHANGELOG.md")
        done = self.release("0.1.0")
        self.assertEqual(done.returncode, 0, done.stderr)
        for part in ("v0.1.0", "libweft_rpc.so.0.1", "- first", "nothing was changed"):
            self.assertIn(part, done.stdout)
        self.assertEqual(self.read("CHANGELOG.md"), before)
        self.assertEqual(self.git("tag"), "")
        self.assertEqual(self.git("status", "--porcelain"), "")

    def test_two_releases(self):
        done = self.release("0.1.0", "--for-real")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(self.read("CHANGELOG.md"), r"## 0\.1\.0 \(\d{4}-\d\d-\d\d\)")
        self.assertIn("### API", self.git("tag", "--list", "--format=%(contents)", "v0.1.0"))
        self.assertEqual(self.git("status", "--porcelain"), "")
        self.write("CHANGELOG.md", self.read("CHANGELOG.md").replace("# Changes\n", "# Changes\n\n## 0.2.0 (not released)\n\n- third\n", 1))
        self.commit()
        self.assertIn("the same: programs built with 0.1.0 go on", self.release("0.1.1").stdout)
        done = self.release("0.2.0", "--for-real")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("a new one", done.stdout)
        self.assertIn("project(weft VERSION 0.2.0 DESCRIPTION", self.read("CMakeLists.txt"))
        self.assertEqual(self.git("rev-parse", "v0.2.0^{commit}"), self.git("rev-parse", "HEAD"))
        notes = self.git("tag", "--list", "--format=%(contents)", "v0.2.0")
        self.assertIn("- third", notes)
        self.assertNotIn("- first", notes)

    def test_BadInput_releases_that_cannot_be(self):
        self.refused("1", "'1' is no version", "0.2.0")
        self.write("new", "x")
        self.refused("0.1.0", "not committed", "new")
        self.commit()
        self.assertEqual(self.release("0.1.0", "--for-real").returncode, 0)
        self.refused("0.2.0", "CHANGELOG.md has nothing", "0.2.0 (not released)")
        self.refused("0.1.0", "does not come after 0.1.0")


if __name__ == "__main__":
    SCRIPT = os.path.abspath(sys.argv.pop(1))
    unittest.main()
