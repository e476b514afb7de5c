# Upstream's image with steering and capture in its vLLM: docs/gpu-quickstart.md.
#     make pilot-wheel && docker build -t vllm-pilot .
FROM vllm/vllm-openai:v0.32.0
COPY dist/vllm_pilot-*.whl /tmp/
# Bytecode is compiled here, and not at each start of a container.
RUN python3 -m pip install --no-cache-dir /tmp/vllm_pilot-*.whl \
    && env -u PYTHONDONTWRITEBYTECODE vllm-pilot apply \
    && vllm-pilot status \
    && rm /tmp/vllm_pilot-*.whl
