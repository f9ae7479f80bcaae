# An image that holds a model folder in /models, the place where KServe and other users of model images expect it, and a
# shell with cp, for init containers. The context is the folder:
#   docker build -f deploy/docker/model.Dockerfile --build-arg BUSYBOX_DIGEST=sha256:... -t sharp-model:0.1.0 FOLDER
ARG BUSYBOX_IMAGE=busybox:1.37
ARG BUSYBOX_DIGEST
FROM ${BUSYBOX_IMAGE}@${BUSYBOX_DIGEST}
COPY . /models
USER 10001:10001
CMD ["ls", "/models"]
