"""Runs docs/howto/kubernetes.yaml as processes with exactly the environment that Kubernetes would give its pods.

usage: kubernetes_test.py --manifest FILE --weftrun PROGRAM --bin FOLDER [--schema]

The pods live in a network and mount namespace of their own, where the service's names lead to loopback and the Secret's folder
has what `weftrun ca` makes. --schema also validates each document against the published schema (the package kubernetes-validate).
Exit code 77, with the reason, where something that this needs is missing.
"""
import argparse
import http.client
import os
import re
import shutil
import subprocess
import sys
import tempfile
import uuid

SKIPPED = 77
LIMIT = 120  # seconds, against hanging


def skip(why):
    print(f"skipped: {why}")
    sys.exit(SKIPPED)


try:
    import yaml
except ImportError:
    skip("python3-yaml is not installed")


def address_of(index):
    """All of 127.0.0.0/8 is this host: a pod's own address, on which its ports are its own."""
    return f"127.0.1.{index + 1}"


def field(path, index, job):
    known = {"metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index),
             "metadata.labels['batch.kubernetes.io/controller-uid']": job, "status.podIP": address_of(index)}
    return known[path]


def environment_of(container, index, job):
    """The variables of one pod: the manifest's, in its order, and the one that an Indexed Job adds."""
    result = {}
    for entry in container["env"]:
        if "valueFrom" in entry:
            value = field(entry["valueFrom"]["fieldRef"]["fieldPath"], index, job)
        else:
            # $(NAME) of a variable that stands before it.
            value = re.sub(r"\$\((\w+)\)", lambda match: result[match.group(1)], entry["value"])
        result[entry["name"]] = value
    result["JOB_COMPLETION_INDEX"] = str(index)
    return result


def check_manifest(service, job):
    spec = job["spec"]
    pod = spec["template"]["spec"]
    container = pod["containers"][0]
    size = {entry["name"]: entry.get("value") for entry in container["env"]}["WORLD_SIZE"]
    assert spec["completionMode"] == "Indexed"
    assert str(spec["completions"]) == str(spec["parallelism"]) == size, "completions, parallelism and WORLD_SIZE differ"
    assert service["spec"]["clusterIP"] == "None", "the service is not headless"
    assert pod["subdomain"] == service["metadata"]["name"], "pods have no names without the service as their subdomain"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    return container, int(size)


def probe(container, which, index):
    """The status that the kubelet would get for one probe of a pod; None: nothing answers."""
    get = container[which]["httpGet"]
    port = {entry["name"]: entry["containerPort"] for entry in container["ports"]}[get["port"]]
    connection = http.client.HTTPConnection(address_of(index), port, timeout=LIMIT)
    try:
        connection.request("GET", get["path"])
        answer = connection.getresponse()
        assert answer.read() == b"", "an answer has content"
        return answer.status
    except ConnectionError:
        return None
    finally:
        connection.close()


def wait_for(container, which, index, pod, wanted):
    status = None
    while status != wanted:
        assert pod.poll() is None, f"pod {index} ended before {which} was {wanted}; the last was {status}"
        status = probe(container, which, index)
    print(f"pod {index}: {which} {status}")


def validate(documents):
    try:
        import kubernetes_validate
    except ImportError:
        skip("the Python package kubernetes-validate is not installed")
    for document in documents:
        kubernetes_validate.validate(document, "1.30", strict=True)
        print(f"{document['kind']}: valid")


def inside(args):
    """In the namespaces: starts the pods and waits for them."""
    documents = list(yaml.safe_load_all(open(args.manifest)))
    container, size = check_manifest(*documents)
    job = str(uuid.uuid4())
    program = os.path.join(args.bin, os.path.basename(container["command"][0]))
    pods = []
    for index in range(size):
        if index == size - 1:
            # As long as one is missing no pod is ready, and all are alive.
            for other, pod in enumerate(pods):
                wait_for(container, "livenessProbe", other, pod, 200)
                wait_for(container, "readinessProbe", other, pod, 503)
        environment = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", **environment_of(container, index, job)}
        pods.append(subprocess.Popen([program, *container["command"][1:]], env=environment, text=True,
                                     stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    failed = False
    for index, pod in enumerate(pods):
        out, _ = pod.communicate(timeout=LIMIT)
        print(f"--- pod {index} ended with {pod.returncode}\n{out}")
        neighbour = (index + 1) % size
        if pod.returncode or f"worker{neighbour} greets worker{index}: hello" not in out:
            failed = True
    return 1 if failed else 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--manifest", required=True)
    parser.add_argument("--weftrun", required=True)
    parser.add_argument("--bin", required=True)
    parser.add_argument("--schema", action="store_true")
    parser.add_argument("--inside", action="store_true")
    args = parser.parse_args()
    if args.inside:
        return inside(args)
    documents = list(yaml.safe_load_all(open(args.manifest)))
    if args.schema:
        validate(documents)
        return 0
    if subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True).returncode:
        skip("this user may make no network and mount namespaces")
    if not shutil.which("ip"):
        skip("iproute2 is not installed")
    _, size = check_manifest(*documents)
    with tempfile.TemporaryDirectory(prefix="weft-kubernetes-") as folder:
        hosts = os.path.join(folder, "hosts")
        mount = documents[1]["spec"]["template"]["spec"]["containers"][0]["volumeMounts"][0]["mountPath"]
        assert mount.startswith("/run/"), "this test can only make folders below /run"
        service, name = documents[0]["metadata"]["name"], documents[1]["metadata"]["name"]
        with open(hosts, "w") as file:
            file.write("127.0.0.1 localhost\n")
            file.writelines(f"127.0.0.1 {name}-{index}.{service}\n" for index in range(size))
        secret = os.path.join(folder, "secret")
        subprocess.run([args.weftrun, "ca", secret, f"worker:{size}"], check=True, stdout=subprocess.DEVNULL)
        os.remove(os.path.join(secret, "ca.key"))
        # /run of this namespace alone, so that the Secret's files appear where the manifest mounts them.
        script = f"""set -e
ip link set lo up
mount --bind {hosts} /etc/hosts
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p {mount}
cp {secret}/* {mount}/
exec "$0" "$@" --inside
"""
        done = subprocess.run(["unshare", "--net", "--mount", "--propagation", "private", "bash", "-c", script,
                               sys.executable, os.path.abspath(__file__), "--manifest", args.manifest, "--weftrun",
                               args.weftrun, "--bin", args.bin], timeout=LIMIT + 60)
        return done.returncode


if __name__ == "__main__":
    sys.exit(main())
