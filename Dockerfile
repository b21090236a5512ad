# A GPU image: CUDA runtime, grpo_lab with vLLM, an unprivileged user. Model downloads live in the volume /cache.
#   docker build -t grpo-lab .
#   docker run --gpus all --ipc host -v grpo-cache:/cache -v $PWD/runs:/home/lab/runs grpo-lab train --method dapo --beta 0.05
FROM nvidia/cuda:12.9.1-runtime-ubuntu24.04

RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv python3-dev gcc \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home lab \
    && install -d -o lab /cache

ENV HF_HOME=/cache/huggingface GRPO_LAB_CACHE=/cache/grpo_lab PATH=/home/lab/venv/bin:$PATH
USER lab
WORKDIR /home/lab
COPY --chown=lab pyproject.toml README.md LICENSE src/
COPY --chown=lab grpo_lab src/grpo_lab
COPY --chown=lab configs configs
# the versions grpo_lab was tested with; vLLM brings the CUDA build of torch that it needs
RUN python3 -m venv venv \
    && pip install --no-cache-dir './src[cuda,wandb]' vllm==0.32.0 transformers==5.19.0 accelerate==1.15.0 peft==0.21.2 datasets==5.2.0

VOLUME /cache
ENTRYPOINT ["grpo-lab"]
CMD ["--help"]
