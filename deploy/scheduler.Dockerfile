# The scheduler service and the client: CPU only, no torch, no model files.
# The core is compiled to C (deploy/compile_core.py); --build-arg CORE=interpreted leaves it as it is, which decides the
# same for up to twice the processor time, and needs no C compiler from Debian.
ARG CORE=compiled

FROM python:3.11-slim-bookworm AS needed
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
# What the project needs, apart from its code, which changes more often. deploy/wheels: see the README there.
RUN --mount=type=bind,source=pyproject.toml,target=pyproject.toml \
    --mount=type=bind,source=constraints.txt,target=constraints.txt \
    --mount=type=bind,source=README.md,target=README.md \
    --mount=type=bind,source=LICENSE,target=LICENSE \
    --mount=type=bind,source=deploy/wheels,target=wheels \
    pip install --find-links wheels -c constraints.txt '.[scheduler]' && rm -rf build stepwire.egg-info

FROM needed AS interpreted
RUN --mount=type=bind,target=/source \
    cp -r /source/. . && pip install --no-deps --force-reinstall -c constraints.txt . \
    && mkdir -p /app/deploy && cp deploy/*.py /app/deploy && rm -rf /build/*

FROM needed AS compiler
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev
RUN --mount=type=bind,source=constraints.txt,target=constraints.txt \
    --mount=type=bind,source=deploy/wheels,target=wheels \
    pip install --find-links wheels -c constraints.txt mypy setuptools
RUN --mount=type=bind,target=/source cd /source && python -m deploy.compile_core /compiled

FROM interpreted AS compiled
COPY --from=compiler /compiled /compiled
ENV PYTHONPATH=/compiled

FROM ${CORE}
WORKDIR /app
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin stepwire
USER stepwire
EXPOSE 50051 5600
# NOT_SERVING (so "unhealthy") until an executor has brought a model.
HEALTHCHECK --interval=10s --timeout=15s --start-period=300s --retries=3 CMD ["python", "-m", "stepwire.probe"]
ENTRYPOINT ["python", "-m", "scheduler_svc"]
CMD ["--listen=0.0.0.0:50051"]
