//! A14 to A16: sliding windows, and none where none was asked for.

use polyhead::{Diagonal, Options, Window};

use crate::operands::{Operands, attend, shape, table};

fn window(left: impl Into<Option<usize>>, right: impl Into<Option<usize>>, diagonal: Diagonal) -> Window {
    Window { left: left.into(), right: right.into(), diagonal }
}

/// `left` and `right` count keys besides the query's own: one before it makes a window of two.
#[test]
fn a14_window_counts_keys_besides_its_own() {
    let operands = Operands::<f32>::uni_ramp(shape(1, (1, 1), (8, 8), (4, 4)));
    let causal = |left| Options::new().window(window(left, 0, Diagonal::TopLeft));
    operands.assert_rows(&causal(1), &[1.0, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5], "two with its own");
    operands.assert_rows(&causal(2), &[1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], "two before its own");
    // The same, with causality as the right end.
    let half_open = |left| Options::new().window(window(left, None, Diagonal::TopLeft)).causal(Diagonal::TopLeft);
    operands.assert_rows(&half_open(1), &[1.0, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5], "window and causal");
    let visible = |options: &Options<'_>| -> Vec<usize> {
        let weights = operands.reference(options).weights;
        weights.chunks(8).map(|row| row.iter().filter(|&&p| p > 0.0).count()).collect()
    };
    assert_eq!(visible(&causal(1)), [1, 2, 2, 2, 2, 2, 2, 2]);
    assert_eq!(visible(&causal(2)), [1, 2, 3, 3, 3, 3, 3, 3]);
    operands.assert_rows(&causal(0), &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], "its own only");
}

#[test]
fn a14_windows_at_block_edges() {
    for (seqlen_q, seqlen_k) in [(300, 300), (33, 300), (130, 20)] {
        let operands = Operands::<f32>::uni_ramp(shape(1, (1, 1), (seqlen_q, seqlen_k), (2, 1)));
        for left in [0, 1, 31, 126, 127, 128, 129] {
            for (diagonal, offset) in [
                (Diagonal::TopLeft, 0),
                (Diagonal::BottomRight, seqlen_k as isize - seqlen_q as isize),
                (Diagonal::Offset(5), 5),
            ] {
                let rows: Vec<f64> = (0..seqlen_q as isize)
                    .map(|i| {
                        let (low, high) =
                            ((i + offset - left as isize).max(0), (i + offset).min(seqlen_k as isize - 1));
                        if low > high { 0.0 } else { (low + high) as f64 / 2.0 + 1.0 }
                    })
                    .collect();
                let context = format!("{seqlen_q} queries, {seqlen_k} keys, {left} before, {diagonal:?}");
                operands.assert_rows(&Options::new().window(window(left, 0, diagonal)), &rows, context);
            }
        }
    }
}

/// A window to both sides, without causality.
#[test]
fn a15_bidirectional_window() {
    let operands = Operands::<f32>::random(shape(1, (1, 1), (300, 300), (17, 17)), 15);
    let mask = table(300, 300, |i, j| i.abs_diff(j) <= 64);
    let both = Options::new().window(window(64, 64, Diagonal::TopLeft));
    let expected = operands.check(&both, "64 to both sides");
    // The reference of the window is that of the mask.
    assert_eq!(expected, operands.reference(&Options::new().mask(attend(&mask, [300, 300]))));
    assert_ne!(expected.out, operands.reference(&Options::new()).out);
    let lengths = [290];
    for (name, options) in [
        ("left open", Options::new().window(window(None, 3, Diagonal::TopLeft))),
        ("right open", Options::new().window(window(3, None, Diagonal::TopLeft))),
        ("open", Options::new().window(window(None, None, Diagonal::TopLeft))),
        ("narrow", Options::new().window(window(1, 1, Diagonal::BottomRight))),
        ("later keys only", Options::new().window(window(0, 7, Diagonal::Offset(10)))),
        ("with causality and lengths", both.causal(Diagonal::Offset(3)).key_lengths(&lengths)),
    ] {
        operands.check(&options, name);
    }
}

/// Without causality every query sees every key, at all lengths.
#[test]
fn a16_not_causal_sees_all() {
    for seqlen in (1..=40).chain([127, 128, 129, 257]) {
        let mean = (seqlen + 1) as f64 / 2.0;
        let operands = Operands::<f32>::uni_ramp(shape(1, (2, 1), (seqlen, seqlen), (4, 4)));
        operands.assert_rows(&Options::new(), &vec![mean; seqlen], seqlen);
    }
    let decode = Operands::<f32>::uni_ramp(shape(1, (1, 1), (1, 9), (4, 4)));
    decode.assert_rows(&Options::new(), &[5.0], "one query");
}
