# syntax=docker/dockerfile:1
# docker build -t batchinfer .                                   GPU build of torch
# docker build -t batchinfer --build-arg TORCH_ARGS="--index-url <the CPU index from PyTorch's install page>" .
FROM python:3.12-slim AS build
ARG TORCH_ARGS=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/batchinfer
ENV PATH=/opt/batchinfer/bin:$PATH
# torch in a layer of its own: it is large and changes seldom
RUN pip install torch==2.13.0 ${TORCH_ARGS}
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY batchinfer batchinfer
COPY kernels kernels
COPY workers workers
COPY migrations migrations
RUN pip install '.[otel]'

FROM python:3.12-slim AS runtime
# a C++ compiler, with which the engine builds its CPU kernels and Triton its launchers
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/batchinfer /opt/batchinfer
ENV PATH=/opt/batchinfer/bin:$PATH BATCHINFER_HOME=/var/lib/batchinfer PYTHONUNBUFFERED=1
RUN useradd --system --create-home batchinfer && mkdir -p /data /var/lib/batchinfer && chown batchinfer /data /var/lib/batchinfer
USER batchinfer
WORKDIR /data
EXPOSE 8000
STOPSIGNAL SIGTERM
ENTRYPOINT ["batchinfer"]
CMD ["--help"]
