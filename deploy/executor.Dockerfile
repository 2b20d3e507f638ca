# One executor on the CPU. The model is mounted, or fetched into the volume at start (compose.yaml).
FROM python:3.11-slim-bookworm
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
# What the project needs, apart from its code, which changes more often. deploy/wheels: see the README there.
RUN --mount=type=bind,source=pyproject.toml,target=pyproject.toml \
    --mount=type=bind,source=constraints.txt,target=constraints.txt \
    --mount=type=bind,source=README.md,target=README.md \
    --mount=type=bind,source=LICENSE,target=LICENSE \
    --mount=type=bind,source=deploy/wheels,target=wheels \
    pip install --find-links wheels -c constraints.txt '.[executor]' && rm -rf build stepwire.egg-info
RUN --mount=type=bind,target=/source \
    cp -r /source/. . && pip install --no-deps --force-reinstall -c constraints.txt . \
    && mkdir -p /app/deploy && cp deploy/*.py /app/deploy && rm -rf /build/*
WORKDIR /app
# Code compiled for this machine's CPU is kept here: the root file system may be read-only.
ENV NUMBA_CACHE_DIR=/var/cache/stepwire
RUN useradd --uid 10002 --no-create-home --shell /usr/sbin/nologin stepwire \
    && mkdir /models /var/cache/stepwire && chown stepwire /models /var/cache/stepwire
USER stepwire
VOLUME /models /var/cache/stepwire
ENTRYPOINT ["python", "-m", "executor_svc"]
