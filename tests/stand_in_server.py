"""A stand-in for vLLM's server, with the routes rollout workers use: `python stand_in_server.py SOCKET_OR_PORT [FAULT ...]`.

Its weights are one number, read from value.txt of a pushed folder; it is every prompt token's log-prob. A completion is a
function of its seed. Faults:

hang: neither /generate nor /weight_info answers         break once, break always: /generate answers 500
refuse: /generate answers 400                            abort once: a completion comes back unfinished
slow: a completion takes 0.1 s                           stall: a completion waits for a pause, or for ever
slow push: a reload or an adapter takes 0.3 s            hold push: it takes as long as this fault stays
ignore next reload, ignore reloads: loaded, yet not      ignore versions: the version stays
nan: prompt log-probs are NaN                            other checksums, broken checksums: of the weights
sharded, packed: the checksums are of two GPUs, of nothing
plain: without the routes of a server for rollouts
"""

import hashlib
import json
import os
import random
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

GENERATE = "/inference/v1/generate"


def sample(seed: int, max_tokens: int) -> tuple[list[int], list[float]]:
    """The tokens and log-probs this server answers for a seed."""
    chance = random.Random(seed)
    return [chance.randrange(100) for _ in range(max_tokens)], [-chance.random() for _ in range(max_tokens)]


def digest(weights: object) -> str:
    """The checksum of weights."""
    return hashlib.sha256(str(weights).encode()).hexdigest()


class Refused(Exception):
    """Status, words."""


class StandIn(ThreadingHTTPServer):
    """Serves in a thread from the start, at a port or a Unix socket; `requests` are (path, body and query), in order."""

    daemon_threads, request_queue_size = True, 128

    def __init__(self, *faults: str, address: str | int = 0) -> None:
        self.faults, self.requests = set(faults), list[tuple[str, dict[str, Any]]]()
        self.value, self.version, self.adapters = 0.0, "default", dict[str, float]()
        self.mode, self.running = "", 0  # of the pause, "" where generation goes on
        self.change, self.stopped = threading.Condition(), False
        if isinstance(address, str):
            self.address_family = socket.AF_UNIX
        super().__init__(address if isinstance(address, str) else ("127.0.0.1", address), Handler)  # type: ignore[arg-type]
        self.url = "http://worker" if isinstance(address, str) else f"http://127.0.0.1:{self.server_address[1]}"
        self.thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def server_bind(self) -> None:
        """Without looking up a name of the address, which a socket has none of."""
        socketserver.TCPServer.server_bind(self)

    def restart(self) -> None:
        """Be as a server that somebody else, its supervisor, started anew."""
        with self.change:
            self.value, self.version, self.mode = 0.0, "default", ""
            self.adapters.clear()
            self.change.notify_all()

    def asked(self, path: str) -> list[dict[str, Any]]:
        """What came to a path, in order."""
        return [given for called, given in self.requests if called == path]

    @property
    def seeds(self) -> list[int]:
        """Of the completions asked for, in order."""
        return [
            given["sampling_params"]["seed"] for given in self.asked(GENERATE) if "seed" in given["sampling_params"]
        ]

    def stop(self) -> None:
        """Close every connection, unanswered ones too."""
        with self.change:
            self.stopped = True
            self.change.notify_all()
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that went away are no error here."""

    def _wait_while(self, condition: Callable[[], object], timeout: float | None = None) -> None:
        """Also until a fault is taken away, which nothing tells."""
        end = time.monotonic() + (1e9 if timeout is None else timeout)
        while condition() and time.monotonic() < end and not self.stopped:
            self.change.wait(0.02)
        if self.stopped:
            raise ConnectionAbortedError

    def _once(self, fault: str) -> bool:
        found = fault in self.faults
        self.faults.discard(fault)
        return found

    def answer(self, path: str, given: dict[str, Any]) -> Any:
        """The JSON of an answer, None for an empty one. Called with `change` held."""
        self.requests.append((path, given))
        if path == "/weight_info":
            self._wait_while(lambda: "hang" in self.faults)
        if path == "/weight_info" and "plain" in self.faults:
            raise Refused(404, "Not Found")
        match path:
            case "/v1/models":
                return {"data": [{"max_model_len": 64}]}
            case "/weight_info":
                return {"weight_version": self.version}
            case "/reset_prefix_cache":
                return {"success": True}
            case "/weight_checker" if "broken checksums" in self.faults:
                raise Refused(500, "cannot count")
            case "/weight_checker":
                return {"checksums": self._checksums()}
            case "/inference/v1/generate":
                return self._generate(given)
            case "/pause":
                self.mode = given["mode"]
                self.change.notify_all()
                self._wait_while(lambda: self.running and self.mode != "keep")
            case "/resume":
                self.mode = ""
                self.change.notify_all()
            case "/collective_rpc":
                self.value = self._load(given["kwargs"]["weights_path"])
            case "/update_weight_version" if "ignore versions" not in self.faults:
                self.version = given["new_version"]
            case "/v1/load_lora_adapter" if given["lora_name"] in self.adapters and not given.get("load_inplace"):
                raise Refused(400, f"The lora adapter '{given['lora_name']}' has already been loaded.")
            case "/v1/load_lora_adapter":
                self.adapters[given["lora_name"]] = self._load(given["lora_path"])
            case "/v1/unload_lora_adapter" if given["lora_name"] not in self.adapters:
                raise Refused(404, f"The lora adapter '{given['lora_name']}' cannot be found.")
            case "/v1/unload_lora_adapter":
                del self.adapters[given["lora_name"]]
            case "/stand_in":  # what a test must know of one in another process
                return {"pid": os.getpid(), "version": self.version, "requests": self.requests}

    def _checksums(self) -> dict[str, str]:
        """By vLLM's names."""
        of_layer = digest("other" if "other checksums" in self.faults else self.value)
        parts = {"rank 1:layer": of_layer} if "sharded" in self.faults else {}
        return {"rank 0:layer": digest("") if "packed" in self.faults else of_layer, **parts}

    def _load(self, folder: str) -> float:
        self._wait_while(lambda: True, 0.3 if "slow push" in self.faults else 0)
        self._wait_while(lambda: "hold push" in self.faults)
        ignored = self._once("ignore next reload") or "ignore reloads" in self.faults
        return self.value if ignored else float((Path(folder) / "value.txt").read_text())

    def _generate(self, given: dict[str, Any]) -> dict[str, Any]:
        model, token_ids, options = given.get("model"), given["token_ids"], given["sampling_params"]
        if "refuse" in self.faults:
            raise Refused(400, "the prompt is not to my taste")
        if self._once("break once") or "break always" in self.faults:
            raise Refused(500, "out of luck")
        self._wait_while(lambda: self.mode)
        if model is not None and model not in self.adapters:
            raise Refused(404, f"The model `{model}` does not exist.")
        value = float("nan") if "nan" in self.faults else self.adapters[model] if model else self.value
        version = self.version
        self.running += 1
        try:
            self._wait_while(lambda: "hang" in self.faults)
            self._wait_while(lambda: self.mode != "abort", 0.1 if "slow" in self.faults else 0)
            if given.get("priority", 0) >= 0:
                self._wait_while(lambda: "stall" in self.faults and not self.mode)
            aborted = self._once("abort once") or self.mode == "abort"
            self._wait_while(lambda: self.mode == "keep")
        finally:
            self.running -= 1
            self.change.notify_all()
        ids, logprobs = sample(options.get("seed", 0), options["max_tokens"])
        if model and given["priority"] < 0:  # the canary of an adapter
            logprobs = [value] * len(ids)
        choice = {
            "token_ids": ids,
            "logprobs": {"content": [{"logprob": logprob} for logprob in logprobs]},
            "finish_reason": "abort" if aborted else "length",
            "weight_versions": [{"version": held} for held in dict.fromkeys((version, self.version))],
        }
        steps = [None, *({str(token): {"logprob": value}} for token in token_ids[1:])]
        return {"choices": [choice], "prompt_logprobs": steps if "prompt_logprobs" in options else None}


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_POST(self) -> None:
        address = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        given = {name: values[0] for name, values in parse_qs(address.query).items()} | json.loads(body or b"{}")
        try:
            with self.server.change:
                status, answer = 200, self.server.answer(address.path, given)
        except Refused as error:
            status, answer = error.args[0], {"error": {"message": error.args[1]}}
        text = b"" if answer is None else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json" if text else "text/plain")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


if __name__ == "__main__":
    where = sys.argv[1]
    StandIn(*sys.argv[2:], address=int(where) if where.isdecimal() else where).thread.join()
