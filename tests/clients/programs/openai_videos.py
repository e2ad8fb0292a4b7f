"""The official package makes a video as a job and a picture at once."""

import base64
import os

import openai

client, model = openai.OpenAI(max_retries=0), os.environ["MODEL"]
video = client.videos.create_and_poll(model=model, prompt="a red circle moving right", seconds="2", size="64x64")
assert video.status == "completed" and video.progress == 100, video
assert client.videos.download_content(video.id).read()[4:8] == b"ftyp"
assert video.id in [one.id for one in client.videos.list()]
assert client.videos.delete(video.id).deleted
picture = client.images.generate(model=model, prompt="a red circle moving right", size="64x64", n=1)
assert base64.b64decode(picture.data[0].b64_json).startswith(b"\x89PNG")
print("ok")
