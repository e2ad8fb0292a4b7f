"""What is drawn is what is read, and what is held out is never in the training half."""

import random

import numpy as np
import pytest

from models.training.video_world import Scene, describe, every_scene, random_scene, read

pytest.importorskip("torch")


def frames_of(scenes, num_frames=17, seed=1):
    from models.training.video_world import draw

    clips = (draw(scenes, num_frames, seed) + 1) * 127.5
    return clips.round().clamp(0, 255).byte().permute(0, 2, 3, 4, 1).numpy()


def test_every_combination_is_read_as_it_was_drawn():
    scenes = every_scene()
    for scene, frames in zip(scenes, frames_of(scenes), strict=True):
        assert all(read(frames).is_right(scene).values()), scene


def test_an_empty_clip_and_noise_are_read_as_nothing():
    assert read(np.zeros((17, 64, 64, 3), np.uint8)).colour == ""
    assert read(np.random.default_rng(1).integers(0, 255, (17, 64, 64, 3), np.uint8)).direction == ""


def test_a_shape_that_stands_still_has_no_direction():
    frames = frames_of([Scene("red", "circle", "up")])
    assert read(np.repeat(frames[0, :1], 17, axis=0)).direction == ""


def test_held_out_combinations_are_kept_apart_and_every_word_of_theirs_is_learnt():
    rng = random.Random(1)
    learnt = [random_scene(rng, False) for _ in range(500)]
    held = [scene for scene in every_scene() if scene.is_held_out]
    assert 5 < len(held) < 30 and not any(scene.is_held_out for scene in learnt)
    words = {word for scene in learnt for word in describe(scene).split()}
    assert all(set(describe(scene).split()) <= words for scene in held)
