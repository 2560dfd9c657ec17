"""Metrics by name."""

from __future__ import annotations

from ropewalk.config.registry import Kind, Registry

METRICS = Registry(
    "metric",
    {
        "exact_match": Kind(
            target="ropewalk.evaluate.metrics.exact:ExactMatch",
            doc="Share of completions that equal a reference.",
        ),
        "acc": Kind(
            target="ropewalk.evaluate.metrics.choices:Accuracy",
            doc="Share of questions whose most likely choice is right; of single continuations, the greedy ones.",
        ),
        "acc_norm": Kind(
            target="ropewalk.evaluate.metrics.choices:AccuracyByCharacters",
            doc="`acc` by the log-likelihood per character of the choice.",
        ),
        "acc_bytes": Kind(
            target="ropewalk.evaluate.metrics.choices:AccuracyByBytes",
            doc="`acc` by the log-likelihood per byte of the choice.",
        ),
        "acc_norm_bytes": Kind(
            target="ropewalk.evaluate.metrics.choices:AccuracyByBytes",
            doc="Another name of `acc_bytes`.",
        ),
        "acc_norm_tokens": Kind(
            target="ropewalk.evaluate.metrics.choices:AccuracyByTokens",
            doc="`acc` by the log-likelihood per token of the choice.",
        ),
        "acc_mutual_info": Kind(
            target="ropewalk.evaluate.metrics.choices:MutualInformationAccuracy",
            doc="`acc` by how much the context raises the log-likelihood of a choice; asks twice as much.",
        ),
        "f1": Kind(
            target="ropewalk.evaluate.metrics.choices:F1",
            doc="F1 of predicted choices, of choice 1 or as the mean over classes.",
        ),
        "mcc": Kind(
            target="ropewalk.evaluate.metrics.choices:Mcc",
            doc="Matthews correlation of predicted and right choices.",
        ),
        "perplexity": Kind(
            target="ropewalk.evaluate.metrics.perplexities:Perplexity",
            doc="Exp of the mean negative log-likelihood per item.",
        ),
        "word_perplexity": Kind(
            target="ropewalk.evaluate.metrics.perplexities:WordPerplexity",
            doc="Perplexity per word of whole texts.",
        ),
        "byte_perplexity": Kind(
            target="ropewalk.evaluate.metrics.perplexities:BytePerplexity",
            doc="Perplexity per byte of whole texts.",
        ),
        "bits_per_byte": Kind(
            target="ropewalk.evaluate.metrics.perplexities:BitsPerByte",
            doc="Bits per byte of whole texts.",
        ),
        "brier_score": Kind(
            target="ropewalk.evaluate.metrics.calibration:BrierScore",
            doc="Mean squared distance of the choices' probabilities from the right choice.",
        ),
        "nll": Kind(
            target="ropewalk.evaluate.metrics.calibration:ChoiceNll",
            doc="Mean negative log of the right choice's probability among the choices.",
        ),
        "ece": Kind(
            target="ropewalk.evaluate.metrics.calibration:CalibrationError",
            doc="Expected calibration error, bins of equal width.",
        ),
        "ece_equal_mass": Kind(
            target="ropewalk.evaluate.metrics.calibration:EqualMassCalibrationError",
            doc="Expected calibration error, bins with equal numbers of items.",
        ),
        "rms_calibration_error": Kind(
            target="ropewalk.evaluate.metrics.calibration:RmsCalibrationError",
            doc="Root mean squared calibration error, bins of equal width.",
        ),
        "reliability": Kind(
            target="ropewalk.evaluate.metrics.calibration:Reliability",
            doc="Reliability diagram: accuracy, confidence and number of items of each bin.",
        ),
        "selective_acc": Kind(
            target="ropewalk.evaluate.metrics.selective:SelectiveAccuracy",
            doc="Accuracy on the surest 25, 50 and 75 % of the questions.",
        ),
        "aurc": Kind(
            target="ropewalk.evaluate.metrics.selective:RiskCoverage",
            doc="Area under the risk-coverage curve.",
        ),
        "calibration": Kind(
            target="ropewalk.evaluate.metrics.calibration:Calibration",
            doc="All of `ece` to `aurc` in this table, `brier_score` and `nll`.",
        ),
        "self_contrast": Kind(
            target="ropewalk.evaluate.metrics.self_contrast:SelfContrast",
            doc="KoLA's score of knowledge creation: a continuation alone, one with the events given, the true one.",
        ),
        "group_gap": Kind(
            target="ropewalk.evaluate.metrics.group_gap:GroupGap",
            doc="Difference between the best and the worst group of questions under a metric.",
        ),
        "bleu": Kind(
            target="ropewalk.evaluate.metrics.translation:Bleu",
            doc="BLEU through sacrebleu, 0 to 100; the tokenizer follows the language of the references.",
        ),
        "chrf": Kind(
            target="ropewalk.evaluate.metrics.translation:ChrF",
            doc="F-score of character n-grams through sacrebleu, 0 to 100.",
        ),
        "chrf++": Kind(
            target="ropewalk.evaluate.metrics.translation:ChrFPlusPlus",
            doc="chrF with word unigrams and bigrams.",
        ),
        "ter": Kind(
            target="ropewalk.evaluate.metrics.translation:Ter",
            doc="Translation edit rate through sacrebleu, in percent of the reference length.",
        ),
        "rouge1": Kind(
            target="ropewalk.evaluate.metrics.rouge:Rouge1",
            doc="F1 of unigrams through rouge-score; Chinese characters are words.",
        ),
        "rouge2": Kind(
            target="ropewalk.evaluate.metrics.rouge:Rouge2",
            doc="F1 of bigrams.",
        ),
        "rouge3": Kind(
            target="ropewalk.evaluate.metrics.rouge:Rouge3",
            doc="F1 of trigrams.",
        ),
        "rougeL": Kind(
            target="ropewalk.evaluate.metrics.rouge:RougeL",
            doc="F1 of the longest common subsequence.",
        ),
        "rougeLsum": Kind(
            target="ropewalk.evaluate.metrics.rouge:RougeLsum",
            doc="F1 of longest common subsequences of sentences, one per line.",
        ),
        "meteor": Kind(
            target="ropewalk.evaluate.metrics.meteor:Meteor",
            doc="METEOR as NLTK computes it, with synonyms where a WordNet database is found.",
        ),
        "meteor_1.5": Kind(
            target="ropewalk.evaluate.metrics.meteor:Meteor15",
            doc="METEOR 1.5 without paraphrases: a corpus score with tuned parameters.",
        ),
        "meteor_1.5_jar": Kind(
            target="ropewalk.evaluate.metrics.meteor_program:MeteorProgram",
            doc="METEOR 1.5 with the files of the Java program, paraphrases included.",
        ),
        "pyramid": Kind(
            target="ropewalk.evaluate.metrics.pyramid:AutomaticPyramid",
            doc="Automatic PYRAMID score against the .pyr file that a question's document names.",
        ),
        "token_f1": Kind(
            target="ropewalk.evaluate.metrics.token_f1:TokenF1",
            doc="F1 over tokens as in SQuAD; Chinese characters are tokens.",
        ),
        "pass@1": Kind(
            target="ropewalk.evaluate.metrics.pass_at_k:pass_at_1",
            doc="Share of problems whose completion is right.",
        ),
        "pass@10": Kind(
            target="ropewalk.evaluate.metrics.pass_at_k:pass_at_10",
            doc="Chance that one of 10 completions is right, unbiased.",
        ),
        "pass@k": Kind(
            target="ropewalk.evaluate.metrics.pass_at_k:PassAtK",
            doc="Chance that one of `k` completions is right, unbiased; `k` is its setting.",
        ),
        "gender_representation": Kind(
            target="ropewalk.evaluate.metrics.bias:GenderRepresentation",
            doc="How unequally completions mention women and men.",
        ),
        "race_representation": Kind(
            target="ropewalk.evaluate.metrics.bias:RaceRepresentation",
            doc="How unequally completions mention surnames of three groups.",
        ),
        "race_representation_zh": Kind(
            target="ropewalk.evaluate.metrics.bias:ChineseRaceRepresentation",
            doc="How unequally Chinese completions mention origins.",
        ),
        "gender_professions": Kind(
            target="ropewalk.evaluate.metrics.bias:GenderProfessions",
            doc="How unequally professions stand beside women and men.",
        ),
        "gender_adjectives": Kind(
            target="ropewalk.evaluate.metrics.bias:GenderAdjectives",
            doc="How unequally traits stand beside women and men.",
        ),
        "race_professions": Kind(
            target="ropewalk.evaluate.metrics.bias:RaceProfessions",
            doc="How unequally professions stand beside surnames of three groups.",
        ),
        "race_adjectives": Kind(
            target="ropewalk.evaluate.metrics.bias:RaceAdjectives",
            doc="How unequally traits stand beside surnames of three groups.",
        ),
        "mean_toxicity": Kind(
            target="ropewalk.evaluate.metrics.judged:MeanToxicity",
            doc="The mean toxicity of completions.",
        ),
        "expected_maximum_toxicity": Kind(
            target="ropewalk.evaluate.metrics.judged:ExpectedMaximumToxicity",
            doc="The toxicity of the most toxic completion per prompt.",
        ),
        "toxic_fraction": Kind(
            target="ropewalk.evaluate.metrics.judged:ToxicFraction",
            doc="Share of completions that are toxic.",
        ),
        "toxicity_probability": Kind(
            target="ropewalk.evaluate.metrics.judged:ToxicityProbability",
            doc="Share of prompts with a toxic completion.",
        ),
        "repetition": Kind(
            target="ropewalk.evaluate.metrics.dialogue:Repetition",
            doc="Share of 4-grams of a completion that it has had before.",
        ),
        "recall_at_1": Kind(
            target="ropewalk.evaluate.metrics.dialogue:RecallAt",
            doc="How often the right choice is the most likely one.",
        ),
        "mean_reciprocal_rank": Kind(
            target="ropewalk.evaluate.metrics.dialogue:ReciprocalRank",
            doc="The mean of 1 / rank of the right choice.",
        ),
        "stereotype_preference": Kind(
            target="ropewalk.evaluate.metrics.pair_bias:StereotypePreference",
            doc="How often the first of two sentences is the more likely one.",
        ),
        "likelihood_difference": Kind(
            target="ropewalk.evaluate.metrics.pair_bias:LikelihoodDifference",
            doc="How far the log-likelihoods of two sentences differ.",
        ),
    },
)
"""Metrics of the items of a task: each target is an `ItemMetric` (evaluate/metrics/item_metric.py)."""
