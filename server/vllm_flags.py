"""Flags of `vllm serve` that Swell has under another name, does not need, or does not have.

Those with the same name and meaning are settings like all others.
"""

NOT_NEEDED = {
    "--disable-frontend-multiprocessing": "front ends and engines are always processes",
    "--disable-log-requests": "requests are logged with --log-level debug only",
    "--enable-chunked-prefill": "long prompts are computed in chunks",
    "--enable-elastic-ep": "`swell scale` changes the number of engines while they serve",
    "--enable-prompt-tokens-details": "`usage` always says how much was cached",
    "--enable-server-load-tracking": "/load always says it",
    "--enable-sleep-mode": "engines can always be put to sleep",
    "--trust-remote-code": "code that comes with a model is never run",
}
"""Flags without a value that ask for what is always so, and that."""

INSTEAD = {
    "--all2all-backend": "experts exchange over torch.distributed",
    "--chat-template-content-format": "it is found in the chat template",
    "--compilation-config": "leave it out; --enforce-eager turns graphs and fused kernels off",
    "--cpu-offload-gb": "weights are on one device; --tensor-parallel-size divides them",
    "--cudagraph-capture-sizes": "leave it out; --enforce-eager turns graphs off",
    "--data-parallel-external-lb": "every API server reaches all engines: use --coordinator",
    "--data-parallel-hybrid-lb": "every API server reaches all engines: use --coordinator",
    "--default-chat-template-kwargs": "requests have chat_template_kwargs",
    "--disable-custom-all-reduce": "leave it out",
    "--disable-log-stats": "use --log-stats-interval 0",
    "--distributed-executor-backend": "leave it out; --data-parallel-backend ray is for Ray",
    "--download-dir": "set HF_HOME",
    "--enable-log-requests": "use --log-level debug",
    "--hf-overrides": "change a copy of config.json",
    "--hf-token": "set HF_TOKEN",
    "--kv-offloading-backend": "use --kv-memory-tier-bytes or --kv-disk-tier-dir",
    "--kv-offloading-size": "use --kv-memory-tier-bytes, in bytes or as 8GiB",
    "--logits-processors": "install a plugin (docs/plugins.md)",
    "--max-num-queued-reqs": "use --max-queue",
    "--max-num-queued-tokens": "use --max-queue-tokens",
    "--mm-processor-cache-gb": "leave it out; --encoder-cache-bytes keeps encoded images",
    "--no-enable-chunked-prefill": "long prompts are computed in chunks",
    "--num-gpu-blocks-override": "use --num-kv-blocks",
    "--profiler-config": "use --torch-profiler-dir",
    "--reasoning-parser-plugin": "install a plugin (docs/plugins.md)",
    "--response-role": "answers have the role assistant",
    "--return-tokens-as-token-ids": "it is a field of requests",
    "--scheduler-cls": "install a plugin for --admission-policy (docs/plugins.md)",
    "--speculative-config": "use --speculative-model or --speculative-ngram",
    "--sse-keep-alive-interval": "use --sse-keep-alive",
    "--structured-outputs-config": "leave it out; docs/structured-outputs.md says what is served",
    "--swap-space": "leave it out; --kv-memory-tier-bytes keeps KV blocks in host memory",
    "--task": "use --runner",
    "--tokenizer": "the tokenizer is the model's own",
    "--tokenizer-mode": "leave it out",
    "--tool-parser-plugin": "install a plugin (docs/plugins.md)",
    "--uvicorn-log-level": "use --log-level",
    "--worker-cls": "install a plugin for --engine-backend (docs/plugins.md)",
    "--worker-extension-cls": "use --worker-extensions",
}
"""What to do about other flags."""
