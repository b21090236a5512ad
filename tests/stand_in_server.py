"""A stand-in for vLLM's server, with the routes that rollout workers use: `python stand_in_server.py PORT [FAULT ...]`.

Its weights are one number, read from value.txt of a pushed folder; it is every prompt token's log-prob. A completion is a
function of its seed. vLLM itself is tried by tests/integration/test_workers.py; this one can be told to misbehave:

hang: neither /generate nor /weight_info answers           break once, break always: /generate answers 500
refuse: /generate answers 400                              abort once: a completion comes back unfinished
slow: a completion takes 0.2 s                             slow push: a reload or an adapter takes 0.3 s
ignore next reload, ignore reloads: loaded, yet not        ignore versions: the version stays
nan: prompt log-probs are NaN                              other checksums, broken checksums: of the weights
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit


def sample(seed: int, max_tokens: int) -> tuple[list[int], list[float]]:
    """The tokens and log-probs this server answers for a seed."""
    chance = random.Random(seed)
    ids = [chance.randrange(100) for _ in range(max_tokens)]
    return ids, [-chance.random() for _ in ids]


class Refused(Exception):
    """Status, words."""


class StandIn(ThreadingHTTPServer):
    """Serves in a thread from the start; `requests` are (path, body and query), in order."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *faults: str, port: int = 0) -> None:
        self.faults, self.requests = set(faults), list[tuple[str, dict[str, Any]]]()
        self.value, self.version, self.adapters = 0.0, "default", dict[str, float]()
        self.mode, self.running = "", 0  # of the pause, "" where generation goes on
        self.change, self.stopped = threading.Condition(), False
        super().__init__(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def asked(self, path: str) -> list[dict[str, Any]]:
        """What came to a path, in order."""
        return [given for called, given in self.requests if called == path]

    @property
    def seeds(self) -> list[int]:
        """Of the completions asked for, in order."""
        sampling = [given["sampling_params"] for given in self.asked("/inference/v1/generate")]
        return [options["seed"] for options in sampling if "prompt_logprobs" not in options]

    def stop(self) -> None:
        """Close every connection, unanswered ones too."""
        with self.change:
            self.stopped = True
            self.change.notify_all()
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error here."""

    def answer(self, path: str, given: dict[str, Any]) -> Any:
        self.requests.append((path, given))
        with self.change:
            if path in ("/inference/v1/generate", "/weight_info"):
                self._wait_while(lambda: "hang" in self.faults)
            return getattr(self, "on_" + path.strip("/").replace("/", "_"))(given)

    def _wait_while(self, condition: Any, timeout: float | None = None) -> None:
        self.change.wait_for(lambda: self.stopped or not condition(), timeout)
        if self.stopped:
            raise ConnectionAbortedError

    def _once(self, fault: str) -> bool:
        found = fault in self.faults
        self.faults.discard(fault)
        return found

    def on_inference_v1_generate(self, given: dict[str, Any]) -> Any:
        if "refuse" in self.faults:
            raise Refused(400, "the prompt is not to my taste")
        if self._once("break once") or "break always" in self.faults:
            raise Refused(500, "out of luck")
        if given["model"] is not None and given["model"] not in self.adapters:
            raise Refused(404, f"The model `{given['model']}` does not exist.")
        self._wait_while(lambda: self.mode)
        version, options = self.version, given["sampling_params"]
        self.running += 1
        try:
            self._wait_while(lambda: self.mode != "abort", 0.2 if "slow" in self.faults else 0)
            aborted = self._once("abort once") or self.mode == "abort"
            self._wait_while(lambda: self.mode == "keep")
        finally:
            self.running -= 1
            self.change.notify_all()
        ids, logprobs = sample(options.get("seed", 0), options["max_tokens"])
        choice = {
            "token_ids": ids,
            "logprobs": {"content": [{"logprob": logprob} for logprob in logprobs]},
            "finish_reason": "abort" if aborted else "length",
            "weight_versions": [{"version": held} for held in dict.fromkeys((version, self.version))],
        }
        value = float("nan") if "nan" in self.faults else self.adapters.get(given["model"], self.value)
        prompt = [{str(token): {"logprob": value}} for token in given["token_ids"]]
        return {"choices": [choice], "prompt_logprobs": [None, *prompt[1:]] if "prompt_logprobs" in options else None}

    def on_health(self, given: dict[str, Any]) -> None:
        pass

    def on_v1_models(self, given: dict[str, Any]) -> Any:
        return {"data": [{"max_model_len": 64}]}

    def on_weight_info(self, given: dict[str, Any]) -> Any:
        return {"weight_version": self.version}

    def on_weight_checker(self, given: dict[str, Any]) -> Any:
        if "broken checksums" in self.faults:
            raise Refused(500, "cannot count")
        return {"checksums": {"layer": "other" if "other checksums" in self.faults else f"sum of {self.value}"}}

    def on_pause(self, given: dict[str, Any]) -> None:
        self.mode = given["mode"]
        self.change.notify_all()
        self._wait_while(lambda: self.running and self.mode != "keep")

    def on_resume(self, given: dict[str, Any]) -> None:
        self.mode = ""
        self.change.notify_all()

    def _load(self, folder: str) -> float:
        self._wait_while(lambda: True, 0.3 if "slow push" in self.faults else 0)
        ignored = self._once("ignore next reload") or "ignore reloads" in self.faults
        return self.value if ignored else float((Path(folder) / "value.txt").read_text())

    def on_collective_rpc(self, given: dict[str, Any]) -> None:
        self.value = self._load(given["kwargs"]["weights_path"])

    def on_update_weight_version(self, given: dict[str, Any]) -> None:
        self.version = self.version if "ignore versions" in self.faults else given["new_version"]

    def on_reset_prefix_cache(self, given: dict[str, Any]) -> Any:
        return {"success": True}

    def on_v1_load_lora_adapter(self, given: dict[str, Any]) -> None:
        if given["lora_name"] in self.adapters and not given.get("load_inplace"):
            raise Refused(400, f"The lora adapter '{given['lora_name']}' has already been loaded.")
        self.adapters[given["lora_name"]] = self._load(given["lora_path"])

    def on_v1_unload_lora_adapter(self, given: dict[str, Any]) -> None:
        if self.adapters.pop(given["lora_name"], None) is None:
            raise Refused(404, f"The lora adapter '{given['lora_name']}' cannot be found.")

    def on_stand_in(self, given: dict[str, Any]) -> Any:
        """Not vLLM's: what a test must know of a stand-in in another process."""
        return {"pid": os.getpid(), "requests": self.requests}


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_POST(self) -> None:
        address = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        given = {name: values[0] for name, values in parse_qs(address.query).items()} | json.loads(body or b"{}")
        try:
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
    StandIn(*sys.argv[2:], port=int(sys.argv[1])).thread.join()
