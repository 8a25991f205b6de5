//! Any sizes, strides and options at all.

use polyhead::{
    Bias, Diagonal, Error, Heads, HeadsMut, Level, Mask, MultiHead, Options, Outputs, Precision, View, ViewMut, Window,
    multi_head_with, reference,
};
use proptest::prelude::*;

use crate::MAX;
use crate::oracle;
use crate::support::levels;

/// Sizes that are small, at the edges of arithmetic, or around what fits nowhere; none that would merely take long.
fn wild_size() -> impl Strategy<Value = usize> {
    prop_oneof![
        12 => 0..4usize,
        1 => prop::sample::select(vec![MAX, MAX - 1, MAX / 2, MAX / 2 + 1, MAX / 4 + 1, MAX / 8 + 1, MAX / 16 + 2]),
    ]
}

fn wild_stride() -> impl Strategy<Value = usize> {
    prop_oneof![
        8 => 0..20usize,
        1 => prop::sample::select(vec![MAX, MAX / 2, 1 << 31, MAX / 4 + 1, MAX / 2 + 1, 1 << (usize::BITS / 2), 1 << 16, MAX / 3]),
    ]
}

fn wild_float() -> impl Strategy<Value = f32> {
    prop_oneof![
        4 => -2.0f32..2.0,
        1 => prop::num::f32::ANY,
        1 => prop::sample::select(vec![0.0, -0.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN, 1e-45]),
    ]
}

fn wild_diagonal() -> impl Strategy<Value = Diagonal> {
    prop_oneof![
        Just(Diagonal::TopLeft),
        Just(Diagonal::BottomRight),
        (-4isize..5).prop_map(Diagonal::Offset),
        prop::sample::select(vec![isize::MIN, isize::MIN + 1, isize::MAX]).prop_map(Diagonal::Offset),
    ]
}

type Geometry = ([usize; 4], [usize; 4]);

/// Everything about a call that may be wrong.
#[derive(Clone, Debug)]
struct Wild {
    sizes: [usize; 7],
    /// Shapes and strides that replace those of `sizes`, of q, k, v, out, weights, mask and bias.
    odd: Vec<(usize, Geometry)>,
    lengths: Option<Vec<usize>>,
    slopes: Option<Vec<f32>>,
    sinks: Option<Vec<f32>>,
    scale: Option<f32>,
    softcap: Option<f32>,
    causal: Option<Diagonal>,
    window: Option<(Option<usize>, Option<usize>, Diagonal)>,
    data: usize,
    wanted: usize,
}

fn wild() -> impl Strategy<Value = Wild> {
    let geometry = (prop::array::uniform4(wild_size()), prop::array::uniform4(wild_stride()));
    let list = || prop::option::weighted(0.2, prop::collection::vec(wild_float(), 0..4));
    let side = || prop::option::of(wild_size());
    (
        prop::array::uniform7(wild_size()),
        prop::collection::vec((0..7usize, geometry), 0..3),
        (prop::option::weighted(0.2, prop::collection::vec(wild_size(), 0..4)), list(), list()),
        (prop::option::weighted(0.7, wild_float()), prop::option::weighted(0.2, wild_float())),
        prop::option::of(wild_diagonal()),
        prop::option::of((side(), side(), wild_diagonal())),
        0..200usize,
        0..4usize,
    )
        .prop_map(|(sizes, odd, (lengths, slopes, sinks), (scale, softcap), causal, window, data, wanted)| Wild {
            sizes,
            odd,
            lengths,
            slopes,
            sinks,
            scale,
            softcap,
            causal,
            window,
            data,
            wanted,
        })
}

impl Wild {
    /// Shape and strides of an operand: packed as far as sizes fit, axes of stride 0 where they do not.
    fn geometry(&self, operand: usize) -> Geometry {
        if let Some((_, geometry)) = self.odd.iter().find(|(which, _)| *which == operand) {
            return *geometry;
        }
        let [b, h, kv, l, s, d, dv] = self.sizes;
        let shape = [
            [b, h, l, d],
            [b, kv, s, d],
            [b, kv, s, dv],
            [b, h, l, dv],
            [b, if self.wanted == 3 { 1 } else { h }, l, s],
            [b, 1, l, s],
            [1, h, 1, s],
        ][operand];
        let mut step = 1usize;
        let mut strides = [0; 4];
        for axis in (0..4).rev().filter(|&axis| shape[axis] < 1 << 20) {
            (strides[axis], step) = (step, step.saturating_mul(shape[axis].max(1)));
        }
        (shape, strides)
    }

    /// Whether it could run, and for longer than a test has time: keys or rows without end that are seen.
    fn is_endless(&self) -> bool {
        self.sizes.iter().chain(self.odd.iter().flat_map(|(_, (shape, _))| shape)).any(|&size| size > 1 << 20)
    }

    /// Makes all views and, unless they are wrong or endless, the calls.
    fn run(&self, level: Level) -> Result<(), Error> {
        let data: Vec<f32> = (0..self.data).map(|x| x as f32 * 0.1 - 3.0).collect();
        let bools: Vec<bool> = (0..self.data).map(|x| x % 3 != 0).collect();
        let view = |operand| {
            let (shape, strides) = self.geometry(operand);
            Heads::with_strides(&data, shape, strides)
        };
        let mut out = data.clone();
        let mut weights = data.clone();
        let mut options = Options::new().level(level).precision(Precision::Medium);
        if let Some(scale) = self.scale {
            options = options.softmax_scale(scale);
        }
        if let Some(cap) = self.softcap {
            options = options.softcap(cap);
        }
        if let Some(diagonal) = self.causal {
            options = options.causal(diagonal);
        }
        if let Some((left, right, diagonal)) = self.window {
            options = options.window(Window { left, right, diagonal });
        }
        if let Some(lengths) = &self.lengths {
            options = options.key_lengths(lengths);
        }
        if let Some(slopes) = &self.slopes {
            options = options.alibi(slopes, self.causal.unwrap_or(Diagonal::TopLeft));
        }
        if let Some(sinks) = &self.sinks {
            options = options.sinks(sinks);
        }
        let shape = oracle::shape(self.sizes);
        if let Ok(plan) = MultiHead::new(shape, &options) {
            assert!(!plan.explain().to_string().is_empty());
        }
        let (mask_shape, mask_strides) = self.geometry(5);
        let mask = Mask::attend(View::with_strides(&bools, mask_shape, mask_strides)?)?;
        let options = if self.data.is_multiple_of(3) { options } else { options.mask(mask) };
        let options = if self.data.is_multiple_of(2) { options } else { options.bias(Bias::new(view(6)?)?) };
        let (q, k, v) = (view(0)?, view(1)?, view(2)?);
        let ((out_shape, out_strides), (weights_shape, weights_strides)) = (self.geometry(3), self.geometry(4));
        let outputs = Outputs::new(HeadsMut::with_strides(&mut out, out_shape, out_strides)?);
        let mut lse = vec![0.0; out_shape[..3].iter().fold(1usize, |len, &size| len.saturating_mul(size)).min(1000)];
        let outputs = if self.wanted > 0 { outputs.lse(&mut lse) } else { outputs };
        let weights = HeadsMut::with_strides(&mut weights, weights_shape, weights_strides);
        let outputs = match self.wanted {
            2 => outputs.weights(weights?),
            3 => outputs.averaged_weights(weights?),
            _ => outputs,
        };
        if self.is_endless() {
            return Ok(());
        }
        let by_reference = reference::multi_head(&q, &k, &v, &options);
        let result = multi_head_with(&q, &k, &v, outputs, &options);
        if let Err(error) = by_reference {
            // As text: a NaN in it is unlike itself.
            let (ours, theirs) = (format!("{result:?}"), format!("{:?}", Err::<(), _>(error)));
            assert_eq!(ours, theirs, "the reference refuses what the kernel takes, or for another reason");
        }
        result
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(
        std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(2000)
    ) })]

    #[test]
    fn errors_not_panics_for_wild_calls(call in wild()) {
        for &level in levels() {
            let result = std::panic::catch_unwind(|| call.run(level));
            prop_assert!(result.is_ok(), "a panic on {}", level.name());
        }
    }

    /// Views alone, with any strides: an error, or every element inside of the slice.
    #[test]
    fn errors_not_panics_for_wild_views(
        shape in prop::array::uniform4(wild_size()), strides in prop::array::uniform4(wild_stride()), len in 0..300usize
    ) {
        let mut data = vec![0u8; len];
        let small = shape.iter().all(|&size| size < 8);
        if let Ok(view) = View::with_strides(&data, shape, strides) {
            let corner = shape.map(|size| size.saturating_sub(1));
            prop_assert_eq!(view.get(corner).is_some(), !shape.contains(&0));
            prop_assert_eq!(view.get(shape), None);
            prop_assert!(view.permute([3, 1, 0, 2]).is_ok());
        }
        if let Ok(view) = ViewMut::with_strides(&mut data, shape, strides) {
            // No two elements in one place: seen by writing a number of its own to each, through the strides.
            let strides = view.strides();
            prop_assert!(shape.contains(&0) || small || shape.iter().all(|&size| size <= len));
            let mut places = std::collections::HashSet::new();
            for at in 0..if small { shape.iter().product() } else { 0 } {
                let [_, h, s, d] = shape;
                let index = [at / d / s / h, at / d / s % h, at / d % s, at % d];
                let place: usize = index.iter().zip(strides).map(|(i, stride)| i * stride).sum();
                prop_assert!(place < len && places.insert(place), "{:?} is {}", index, place);
            }
        }
        let _ = Heads::contiguous(&data, shape);
        let _ = HeadsMut::bshd(&mut data, shape);
    }
}
