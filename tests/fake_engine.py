"""A server on the loopback address that answers as vLLM does, or misbehaves."""

import contextlib
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

#: A prompt's first token: what the server does with it.
PLAIN, REFUSE, DIE, COMPLAIN, SLOW, SHORT, MEET = range(7)

# Two engines, a value with a comma, a quote and a brace in it, and an exponent.
METRICS = r"""# HELP vllm:num_requests_running Number of requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_preemptions_total{engine="0",model_name="m"} 5.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 1.25e-01

vllm:cache_config_info{block_size="32",odd="a,\"}\\n",SIZES} 1.0
python_info 1.0
""".replace("SIZES", 'num_gpu_blocks="45",kv_cache_size_tokens="1440"')


class Fake(BaseHTTPRequestHandler):
    """Answers as vLLM does, or misbehaves as the prompt's first token says."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def page(self, content: str, status: int = 200):
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content.encode())

    def do_GET(self):
        if self.path == "/metrics":
            return self.page(METRICS)
        return self.page("", 200 if self.path == "/health" else 404)

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "prompt_logprobs" in asked:
            rows = [
                None,
                *({str(t): {"logprob": -t / 10}} for t in asked["prompt"][1:]),
            ]
            return self.page(json.dumps({"choices": [{"prompt_logprobs": rows}]}))
        assert asked["stream"] and asked["ignore_eos"] and asked["temperature"] == 0
        if asked["prompt"][0] == REFUSE:
            return self.page('{"error": "too long"}', 400)
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with self.server.changed:
            self.server.busy += 1
            self.server.most = max(self.server.most, self.server.busy)
            self.server.changed.notify_all()
        try:
            alive = self.tokens(asked)
        finally:
            # Before the client hears of the end: its next request may come at once.
            with self.server.changed:
                self.server.busy -= 1
        if not alive:
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.event({"choices": [], "usage": {}})
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def tokens(self, asked: dict) -> bool:
        """Send them; returns whether the answer then ends as it should."""
        start, *_ = asked["prompt"]
        if start == MEET:  # goes on once two were answered at a time
            with self.server.changed:
                self.server.changed.wait_for(lambda: self.server.most > 1, timeout=20)
        for i in range(asked["max_tokens"]):
            if start == DIE and i == 2:
                return False
            if start == COMPLAIN and i == 2:
                self.event({"error": {"message": "out of luck"}})
                break
            time.sleep(0.2 if start == SLOW else 0.002)
            self.event({"choices": [{"token_ids": [100 + i]}]})
            if start == SHORT and i == 2:
                break
        return True

    def event(self, content: dict):
        self.chunk(b"data: " + json.dumps(content).encode() + b"\n\n")

    def chunk(self, content: bytes):
        with contextlib.suppress(OSError):  # the client may have gone
            self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))


class Web(ThreadingHTTPServer):
    """Counts the completions that it answers at a time, and the most so far."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Fake)
        self.busy = self.most = 0
        self.changed = threading.Condition()


@contextlib.contextmanager
def running():
    """Yield a new one."""
    with Web() as web:
        thread = threading.Thread(target=web.serve_forever, args=(0.01,))
        thread.start()
        yield web
        web.shutdown()
        thread.join()
