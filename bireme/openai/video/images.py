"""POST /v1/images/generations."""

from __future__ import annotations

import time

from bireme.openai.http.call import Call
from bireme.openai.video.served_video import VideoModels
from bireme.pipelines.chat_answer import encode_json
from bireme.pipelines.json_body import decode_body
from bireme.pipelines.video_request import REFUSED, ImageBody, check_images
from bireme.pipelines.video_service import result_tree


class Images:
    def __init__(self, models: VideoModels) -> None:
        self._models = models

    async def generate(self, call: Call, data: bytes) -> None:
        body = decode_body(data, ImageBody, REFUSED)
        model = self._models.get(body.model)
        call.notes["model"] = model.name
        request = check_images(body)
        model.check(request)
        result = await call.unless_gone(model.service.run(request.ask, lambda progress: None, call.trace))
        answer = {"created": int(time.time()), "model": model.name, "data": await model.delivery.data(result, request)}
        await call.reply(200, encode_json(answer | result_tree(result)))
