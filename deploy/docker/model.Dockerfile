# An image that holds a model folder and cp, for deploy/kubernetes/components/model-from-image. The context is the folder:
#   docker build -f deploy/docker/model.Dockerfile --build-arg BUSYBOX_DIGEST=sha256:... -t sharp-model:0.1.0 FOLDER
ARG BUSYBOX_IMAGE=busybox:1.37
ARG BUSYBOX_DIGEST
FROM ${BUSYBOX_IMAGE}@${BUSYBOX_DIGEST}
COPY . /model
USER 10001:10001
CMD ["ls", "/model"]
